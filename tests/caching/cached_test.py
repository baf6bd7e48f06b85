"""Identities of the paper, room, and errors of `Cached`."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from memcache_jax.caching import (
  Cached,
  Constant,
  GatedResidual,
  Logarithmic,
  MemorySoup,
  MovingAverage,
  Residual,
  SparseSelective,
)
from memcache_jax.memories import (
  DecayedLinear,
  HeadShape,
  Linear,
  SlidingWindowLinear,
)
from memcache_jax.testing import assert_close, random_tokens, stream, take
from tests.memories.models import Saturating

SHAPE = HeadShape(2, 6, 5)
T, C = 40, 8


@functools.partial(jax.jit, static_argnums=0)
def _scan(memory, tokens, state=None):
  """One program for all tests of a memory."""
  return memory.scan({}, state, tokens)


def _plain(memory, length=T, seed=0):
  """Tokens without masks and documents: the way without moving tokens."""
  tokens = random_tokens(memory, SHAPE, 2, length, seed=seed)
  return replace(tokens, mask=None, starts=None)


def _cached(memory=None, aggregate=None, mode="independent"):
  memory, aggregate = memory or Linear(), aggregate or GatedResidual()
  return Cached(memory, Constant(C), aggregate, mode)


@pytest.mark.parametrize(
  "aggregate",
  [
    Residual(),
    GatedResidual(),
    MemorySoup(),
    SparseSelective(2),
    MovingAverage(),
  ],
)
@pytest.mark.parametrize("memory", [DecayedLinear(), Saturating()])
def test_one_segment_is_the_bare_memory(memory, aggregate):
  cached = Cached(memory, Constant(T), aggregate)
  tokens = _plain(cached)
  bare = replace(tokens, gates={n: tokens.gates[n] for n in memory.gates()})
  assert_close(_scan(cached, tokens)[0], _scan(memory, bare)[0])


def test_residual_over_linear_attention_is_linear_attention():
  cached = _cached(aggregate=Residual())
  tokens = _plain(cached)
  assert_close(_scan(cached, tokens)[0], _scan(Linear(), tokens)[0])


def test_residual_over_checkpoints_counts_earlier_segments_again():
  """Token j of segment s_j counts s - s_j + 1 times for a token in s."""
  cached = _cached(aggregate=Residual(), mode="checkpoint")
  tokens = _plain(cached)
  segment = np.arange(T) // C
  times = segment[:, None] - segment[None] + 1
  times = jnp.asarray(np.tril(times), jnp.float32)
  scores = jnp.einsum("btnk,benk->bnte", tokens.q, tokens.k)
  expected = jnp.einsum("bnte,benv->btnv", scores * times[None, None], tokens.v)
  assert_close(_scan(cached, tokens)[0], expected)


@pytest.mark.parametrize("mode", ["independent", "checkpoint"])
def test_soup_is_gated_residual_for_linear_reads(mode):
  soup = _cached(DecayedLinear(), MemorySoup(), mode)
  tokens = _plain(soup)
  gated = _cached(DecayedLinear(), GatedResidual(), mode)
  assert_close(_scan(soup, tokens), _scan(gated, tokens))


def test_soup_is_not_gated_residual_for_other_reads():
  soup = _cached(Saturating(), MemorySoup())
  tokens = _plain(soup)
  y = _scan(soup, tokens)[0]
  gated = _scan(_cached(Saturating(), GatedResidual()), tokens)[0]
  assert_close(y[:, :C], gated[:, :C])
  difference = jnp.abs(y - gated)[:, C:]
  assert float(jnp.max(difference)) > 1e-2


@pytest.mark.parametrize("top_k", [4, 9])
def test_selecting_all_is_gated_residual(top_k):
  sparse = _cached(DecayedLinear(), SparseSelective(top_k))
  tokens = _plain(sparse)
  gated = _cached(DecayedLinear(), GatedResidual())
  assert_close(_scan(sparse, tokens), _scan(gated, tokens))


def test_a_zero_router_weighs_all_memories_equally():
  cached = _cached()
  tokens = _plain(cached)
  tokens = replace(tokens, gates={"u": jnp.zeros_like(tokens.gates["u"])})
  weights = jax.jit(lambda x: cached.inspect({}, None, x)[2])(tokens)
  for t in range(T):
    segment = t // C
    expected = np.zeros(weights.shape[-1])
    expected[[*range(segment), -1]] = 1 / (segment + 1)
    np.testing.assert_allclose(weights[0, t, 0], expected, rtol=1e-6)


def test_no_gradient_reaches_a_memory_that_was_not_selected():
  sparse = _cached(aggregate=SparseSelective(1))
  tokens = _plain(sparse)

  def last_output(k):
    y, _, weights = sparse.inspect({}, None, replace(tokens, k=k))
    return jnp.sum(jnp.square(y[0, -1, 0])), weights[0, -1, 0]

  grad, weights = jax.jit(jax.grad(last_output, has_aux=True))(tokens.k)
  per_segment = np.abs(grad[0, :, 0]).reshape(T // C, C, -1).sum(axis=(1, 2))
  read = np.asarray(weights) > 0
  assert read[:-1].sum() == 1
  np.testing.assert_array_equal(per_segment > 0, read)


def test_top_k_prefers_the_older_of_equals():
  sparse = _cached(aggregate=SparseSelective(2, gate="none"))
  tokens = _plain(sparse)
  tokens = replace(tokens, gates={"u": jnp.zeros_like(tokens.gates["u"])})
  weights = jax.jit(lambda x: sparse.inspect({}, None, x)[2])(tokens)
  np.testing.assert_array_equal(weights[0, -1, 0], [1, 1, 0, 0, 1])


def test_gradients_flow_through_the_cache():
  """The loss of the last segment moves what the first one wrote."""
  cached = _cached()
  tokens = _plain(cached)

  def loss(v):
    y, _ = cached.scan({}, None, replace(tokens, v=v))
    return jnp.sum(jnp.square(y[:, -C:]))

  grad = jax.jit(jax.grad(loss))(tokens.v)
  assert float(jnp.min(jnp.sum(jnp.abs(grad[:, :C]), axis=(0, 2, 3)))) > 0


def test_the_definition_of_the_op_gives_the_same():
  xla, reference = (
    _cached(DecayedLinear(implementation=name)) for name in ("xla", "reference")
  )
  tokens = _plain(xla)
  assert_close(_scan(xla, tokens), _scan(reference, tokens))


def test_room():
  """What does not fit is nan from its first token on, in every split."""
  cached = _cached()
  tokens = _plain(cached)
  state = cached.init_state({}, SHAPE, 2, max_length=2 * C + 3)
  assert state.index.shape == (2, 2)
  fits, lost = 3 * C, slice(3 * C, None)
  expected = _scan(cached, tokens)[0]
  scan = lambda state, tokens: _scan(cached, tokens, state)
  for sizes in ([T], [17, 6, 17], [1]):
    y, after = stream(scan, state, tokens, sizes)
    assert_close(y[:, :fits], expected[:, :fits])
    assert np.all(np.isnan(y[:, lost]))
    np.testing.assert_array_equal(after.count, T // C)
  # A new document is whole again.
  starts = jnp.zeros((2, T), bool).at[:, 0].set(True)
  again = replace(tokens, starts=starts, max_unaligned_starts=1)
  y, _ = scan(after, again)
  assert_close(y[:, :fits], expected[:, :fits])


def test_a_state_made_by_the_call_has_room_for_that_call():
  cached = _cached()
  tokens = _plain(cached)
  _, state = _scan(cached, take(tokens, 0, 17))
  assert state.index.shape == (2, 2)
  y, _ = _scan(cached, take(tokens, 17, T), state)
  expected = _scan(cached, tokens)[0]
  assert_close(y[:, : 3 * C - 17], expected[:, 17 : 3 * C])
  assert np.all(np.isnan(y[:, 3 * C - 17 :]))


def test_more_unaligned_starts_than_said():
  cached = _cached()
  tokens = random_tokens(cached, SHAPE, 2, T)
  starts = jnp.zeros((2, T), bool).at[0, jnp.array([3, 13, 21])].set(True)
  tokens = replace(tokens, starts=starts)
  few, enough = (replace(tokens, max_unaligned_starts=n) for n in (1, 3))
  y, state = _scan(cached, few)
  expected = _scan(cached, enough)
  assert np.all(np.isnan(y[0]))
  assert np.all(np.isnan(state.online.matrix[0]))
  chex.assert_trees_all_close(y[1], expected[0][1], atol=1e-6)
  # Left out, they are counted; the starts must not be traced for that.
  counted = replace(few, max_unaligned_starts=None)
  run = jax.jit(lambda q: cached.scan({}, None, replace(counted, q=q)))
  assert_close(run(counted.q), expected)


def test_documents_on_segment_borders_need_no_bound():
  cached = _cached(DecayedLinear())
  tokens = random_tokens(cached, SHAPE, 2, T)
  starts = jnp.zeros((2, T), bool).at[:, jnp.array([0, C, 3 * C])].set(True)
  tokens = replace(tokens, starts=starts)
  aligned = replace(tokens, max_unaligned_starts=0)
  y, _ = _scan(cached, aligned)
  alone = replace(take(tokens, C, 3 * C), starts=None)
  assert_close(y[:, C : 3 * C], _scan(cached, alone)[0])


@pytest.mark.parametrize("mode", ["independent", "checkpoint"])
def test_documents_on_segment_borders_move_no_token(mode):
  memory = _cached(mode=mode)
  starts = np.zeros((2, T), bool)
  starts[0, [0, 16]] = starts[1, 8] = True
  tokens = replace(
    _plain(memory), starts=jnp.asarray(starts), max_unaligned_starts=0
  )
  # A mask, though it hides nothing, has tokens moved.
  moved = replace(tokens, mask=jnp.ones((2, T), bool))
  scan = functools.partial(_scan, memory)
  assert_close(scan(tokens), scan(moved), 1e-6)
  for row, start in ((0, 15), (1, 39)):
    starts[row, start] = True
    y, _ = scan(replace(tokens, starts=jnp.asarray(starts)))
    assert jnp.isnan(y[row]).all()
    assert jnp.isfinite(y[1 - row]).all() or row == 1
  count = lambda tokens: str(jax.make_jaxpr(scan)(tokens)).count(" gather[")
  assert count(tokens) < count(moved)


def test_segments_beyond_the_gates_are_nan():
  cached = _cached(aggregate=GatedResidual(gate="input", max_segments=2))
  tokens = random_tokens(cached, SHAPE, 2, 3 * C)
  state = cached.init_state({}, SHAPE, 2, max_length=T)
  y, _ = _scan(cached, tokens, state)
  assert np.all(np.isfinite(y[:, : 2 * C]))
  assert np.all(np.isnan(y[:, 2 * C :]))
  with pytest.raises(ValueError, match="`max_segments` must be at least 3"):
    cached.scan({}, None, replace(tokens, mask=None, starts=None))


def test_nothing_as_large_as_tokens_times_memory():
  cached = _cached()
  tokens = _plain(cached, 128)

  def loss(tokens):
    return jnp.sum(jnp.square(cached.scan({}, None, tokens)[0]))

  jaxpr = jax.make_jaxpr(jax.grad(loss))(tokens)
  memory = SHAPE.num_heads * SHAPE.key_dim * SHAPE.value_dim
  assert _largest(jaxpr.jaxpr) < 2 * 128 * memory


def _largest(jaxpr) -> int:
  sizes = [1]
  for eqn in jaxpr.eqns:
    sizes += [v.aval.size for v in eqn.outvars if hasattr(v.aval, "size")]
    sizes += [_largest(j) for j in jaxprs_in_params(eqn.params)]
  return max(sizes)


def test_the_program_does_not_grow_with_the_sequence():
  cached = _cached(DecayedLinear())

  def lines(length):
    tokens = _plain(cached, length)
    loss = lambda tokens: jnp.sum(cached.scan({}, None, tokens)[0])
    text = jax.jit(jax.grad(loss)).lower(tokens).as_text()
    return len(text.splitlines())

  # From 16 segments on there are as many bands as there will ever be.
  assert lines(128 * C) <= 1.15 * lines(16 * C)


def _fails(call, match):
  with pytest.raises(ValueError, match=match):
    call()


@pytest.mark.usefixtures("as_a_user")
def test_wrong_arguments():
  _fails(lambda: Cached(_cached()), "`memory` must not be cached already")
  _fails(lambda: Constant(0), "`length` must be an int of at least 1")
  _fails(lambda: SparseSelective(0), "`top_k` must be an int of at least 1")
  _fails(lambda: GatedResidual(gate="output"), "`gate` must be one of")
  _fails(lambda: GatedResidual(gate="input"), "`max_segments` must be given")
  _fails(lambda: GatedResidual(pooling="max"), "`pooling` must be one of")
  _fails(
    lambda: Cached(Linear(), write_mode="restart"),
    "`write_mode` must be one of",
  )
  _fails(
    lambda: Cached(Linear(), aggregate="grm"), "`aggregate` must be an instance"
  )
  cached = _cached()
  _fails(lambda: cached.init_state({}, SHAPE, 2), "`max_length` must be given")
  tokens = random_tokens(cached, SHAPE, 2, T)
  _fails(
    lambda: cached.scan({}, None, replace(tokens, gates={})),
    r"`gates` must be \['u'\]",
  )
  _fails(
    lambda: cached.scan({}, None, replace(tokens, mask=tokens.mask[:, :-1])),
    "`mask` must have axes",
  )
  for bound in (-1, 1.5):
    wrong = replace(tokens, max_unaligned_starts=bound)
    _fails(
      lambda wrong=wrong: cached.scan({}, None, wrong),
      "`max_unaligned_starts` must be None or an int",
    )
  bare = Linear().init_state({}, SHAPE, 2)
  _fails(lambda: cached.scan({}, bare, tokens), "`state` must be what")
  windowed = Cached(SlidingWindowLinear(3), Constant(C))
  other = windowed.init_state({}, SHAPE, 2, max_length=T)
  _fails(
    lambda: cached.scan({}, other, tokens), "`state` must come from the same"
  )
  other = cached.init_state({}, SHAPE, 3, max_length=T)
  _fails(
    lambda: cached.scan({}, other, tokens), r"`state\.online\.matrix` must"
  )
  merging = Cached(Linear(), Logarithmic(C))
  other = merging.init_state({}, SHAPE, 2, max_length=T)
  _fails(
    lambda: cached.scan({}, other, tokens), "`state` must come from a memory"
  )
  unknown = replace(tokens, max_unaligned_starts=None)
  _fails(
    lambda: jax.jit(lambda x: cached.scan({}, None, x))(unknown),
    "`max_unaligned_starts` must be given",
  )


@pytest.mark.parametrize(
  ("names", "kept"), [(("segment_ends",), 1), (("others",), 0)]
)
def test_a_policy_keeps_what_segments_left(names, kept):
  memory = Cached(SlidingWindowLinear(), Constant(C), GatedResidual())
  tokens = random_tokens(memory, SHAPE, 2, T)
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  read = lambda tokens: memory.scan({}, None, tokens)[0]
  read = jax.checkpoint(read, policy=policy)
  residuals = jax.eval_shape(lambda tokens: jax.vjp(read, tokens)[1], tokens)
  shapes = [x.shape for x in jax.tree.leaves(residuals)]
  assert shapes.count((2, T // C, *SHAPE)) == kept
  # Beside the tokens themselves nothing is kept of each.
  ours = {x.shape for x in jax.tree.leaves(tokens)}
  assert {shape for shape in shapes if T in shape} <= ours
