"""`Explicit` segments: where they end, how many there is room for, errors."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import (
  Cached,
  Constant,
  Explicit,
  GatedResidual,
  Logarithmic,
)
from memcache_jax.decoding import decode_step
from memcache_jax.layers import Attention
from memcache_jax.memories import HeadShape, Linear
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  ModelConfig,
)
from memcache_jax.testing import assert_close, random_tokens, stream
from tests.layers.cases import fast_to_compile, louder

SHAPE = HeadShape(2, 6, 5)
T, LONGEST, ROOM = 24, 5, 6
MEMORY = Cached(Linear(), Explicit(LONGEST, ROOM), GatedResidual())


def _flags(*rows):
  flags = np.zeros((len(rows), T), bool)
  for row, places in zip(flags, rows, strict=True):
    row[list(places)] = True
  return jnp.asarray(flags)


def _tokens(ends, starts=((), ())):
  """Masked tokens are flagged too, which must mean nothing."""
  tokens = random_tokens(MEMORY, SHAPE, 2, T, mask_probability=0.2, seed=1)
  mask = tokens.mask | _flags(*ends) | _flags(*starts)
  return replace(
    tokens,
    mask=mask,
    starts=_flags(*starts),
    segment_ends=_flags(*ends) | ~mask,
    max_unaligned_starts=2,
  )


_scan = fast_to_compile(lambda state, x: MEMORY.scan({}, state, x))


def _empty():
  return MEMORY.init_state({}, SHAPE, 2, max_length=T)


def _definition(tokens, row):
  """Outputs of the first head, token by token, in NumPy."""
  q, k, v, u = (
    np.float64(x[row, :, 0])
    for x in (tokens.q, tokens.k, tokens.v, tokens.gates["u"])
  )
  segments, y = [[]], np.zeros((T, SHAPE.value_dim))
  for t in range(T):
    if not tokens.mask[row, t]:
      continue
    segments[-1].append(t)
    pools = np.stack([k[s].mean(axis=0) for s in segments])
    gates = np.exp(pools @ u[t])
    gates /= gates.sum()
    memories = np.stack([k[s].T @ v[s] for s in segments])
    y[t] = q[t] @ np.einsum("s,skv->kv", gates, memories)
    if tokens.segment_ends[row, t] or len(segments[-1]) == LONGEST:
      segments.append([])
  return y, len(segments) - 1


def test_segments_end_at_flags_or_when_they_are_full():
  tokens = _tokens([(2, 3, 20), (9,)])
  y, state = _scan(None, tokens)
  for row in range(2):
    expected, count = _definition(tokens, row)
    np.testing.assert_allclose(y[row, :, 0], expected, atol=1e-5)
    assert state.count[row] == count


def test_without_flags_the_program_is_that_of_constant_segments():
  tokens = random_tokens(MEMORY, SHAPE, 2, T)
  tokens = replace(tokens, mask=None, starts=None, segment_ends=None)
  programs = [
    str(jax.make_jaxpr(lambda x, m=memory: m.scan({}, None, x))(tokens))
    for memory in (
      replace(MEMORY, segments=segments)
      for segments in (Explicit(LONGEST, T // LONGEST), Constant(LONGEST))
    )
  ]
  assert programs[0] == programs[1]


@pytest.mark.parametrize("length", [3, 7, 11])
def test_a_new_sequence_needs_neither_flags_nor_a_state(length):
  """There is room for more memories than so few tokens make."""
  tokens = random_tokens(MEMORY, SHAPE, 2, length)
  tokens = replace(tokens, mask=None, starts=None, segment_ends=None)
  y, state = _scan(None, tokens)
  want, last = _scan(MEMORY.init_state({}, SHAPE, 2, max_length=length), tokens)
  assert_close(y, want)
  chex.assert_trees_all_equal_shapes(state, last)
  assert_close(state, last)


def test_room():
  """What does not fit is nan from its first token on, in every split."""
  tokens = _tokens([range(0, T, 2), (9,)])
  fits = [2 * ROOM + 1, T]
  pieces, after = stream(_scan, _empty(), tokens, [1])
  for y in (_scan(None, tokens)[0], _scan(_empty(), tokens)[0], pieces):
    for row, last in enumerate(fits):
      expected, _ = _definition(tokens, row)
      np.testing.assert_allclose(y[row, :last, 0], expected[:last], atol=1e-5)
    lost = np.isnan(y[0, fits[0] :]).all(axis=(1, 2))
    np.testing.assert_array_equal(lost, tokens.mask[0, fits[0] :])
  # A new document is whole again.
  again = _tokens([(2, 3, 20), (9,)], [(0,), (0,)])
  fresh, _ = _scan(None, replace(again, starts=_flags((), ())))
  assert_close(_scan(after, again)[0], fresh)


def test_more_flags_in_a_call_than_rows_for_them():
  """Only several documents together can have so many."""
  tokens = _tokens([range(16), (4,)], [(6, 12), (5,)])
  y, state = _scan(_empty(), tokens)
  pieces, _ = stream(_scan, _empty(), tokens, [1])
  assert np.all(np.isnan(y[0]))
  assert np.all(np.isnan(state.online.matrix[0]))
  chex.assert_tree_all_finite(pieces)
  np.testing.assert_allclose(y[1], pieces[1], atol=1e-5)


CONFIG = ModelConfig(
  vocab_size=9,
  dim=8,
  num_layers=2,
  pattern=(MemorySpec(MEMORY, 2), AttentionSpec(2, window=3)),
  hidden_dim=8,
)


def test_a_model_takes_flags_to_where_they_mean_something():
  model = louder(LanguageModel(CONFIG, rngs=nnx.Rngs(0)))
  ids = jax.random.randint(jax.random.key(0), (2, 7), 0, 9)
  mask = jnp.ones((2, 7), bool).at[0, 1].set(False)
  ends = jnp.zeros((2, 7), bool).at[:, jnp.array([1, 3])].set(True)

  @fast_to_compile
  def whole(model, ends):
    return model(ids, mask=mask, segment_ends=ends)[0]

  expected, state = whole(model, ends), model.init_state(2, 7)
  step = fast_to_compile(decode_step)
  for t in range(7):
    logits, state = step(
      model, ids[:, t], state, mask=mask[:, t], segment_ends=ends[:, t]
    )
    real = mask[:, t]
    chex.assert_trees_all_close(logits[real], expected[real, t], atol=1e-4)
  np.testing.assert_array_equal(state[0].memory.count, [1, 2])
  assert np.any(np.abs(whole(model, ~ends) - expected)[:, 4:] > 1e-3)


def _fails(call, match):
  with pytest.raises(ValueError, match=match):
    call()


@pytest.mark.usefixtures("as_a_user")
def test_wrong_arguments():
  _fails(lambda: Explicit(0), "`length` must be an int of at least 1")
  _fails(lambda: Explicit(8, 0), "`max_segments` must be an int of at least 1")
  tokens = _tokens([(), ()])
  for wrong, match in (
    (jnp.zeros((2, T)), "`segment_ends` must be boolean: got float32"),
    (jnp.zeros((2, 3), bool), r"`segment_ends` must have axes .*\(2, 3\)"),
  ):
    given = replace(tokens, segment_ends=wrong)
    _fails(lambda given=given: MEMORY.scan({}, None, given), match)
  unused = "`segment_ends` must be None for "
  for segments in (Constant(LONGEST), Logarithmic(LONGEST)):
    other = replace(MEMORY, segments=segments)
    _fails(
      lambda other=other: other.scan({}, None, tokens), unused + "a memory"
    )
  bare = replace(tokens, gates={})
  _fails(lambda: Linear().scan({}, None, bare), unused + "a memory")
  ends = jnp.zeros((1, 3), bool)
  attention = Attention(8, 2, rngs=nnx.Rngs(0))
  _fails(
    lambda: attention(jnp.ones((1, 3, 8)), segment_ends=ends),
    unused + "attention",
  )
  config = replace(CONFIG, num_layers=1, pattern=CONFIG.pattern[1:])
  model = LanguageModel(config, rngs=nnx.Rngs(0))
  _fails(
    lambda: model(jnp.zeros((1, 3), jnp.int32), segment_ends=ends),
    unused + "a model",
  )
