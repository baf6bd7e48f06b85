import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import Cached, Constant, GatedResidual
from memcache_jax.layers import NoDecayParam
from memcache_jax.memories import Linear, SlidingWindowLinear, Titans
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  ModelConfig,
  memory_reports,
  next_token_loss,
  segment_gates,
)
from memcache_jax.ops.mlp_memory import MLP
from tests.layers.cases import fast_to_compile, lengths_of_pieces, louder

VOCAB, LENGTH = 17, 22
CACHED = Cached(SlidingWindowLinear(), Constant(4))
CONFIG = ModelConfig(
  vocab_size=VOCAB,
  dim=8,
  num_layers=4,
  pattern=(MemorySpec(CACHED, 2), AttentionSpec(2, window=5)),
  hidden_dim=12,
)
# Compiles faster, where memories do not matter.
SMALL = dataclasses.replace(
  CONFIG, pattern=(MemorySpec(Linear(), 2),), num_layers=2
)


def make(config=CONFIG):
  return louder(LanguageModel(config, rngs=nnx.Rngs(0)))


def tokens(length=LENGTH, rows=2, seed=0):
  return jax.random.randint(
    jax.random.key(seed), (rows, length), 0, VOCAB, jnp.int32
  )


@fast_to_compile
def run(model, tokens, state=None, mask=None, starts=None):
  return model(
    tokens,
    state,
    mask=mask,
    starts=starts,
    max_unaligned_starts=None if starts is None else tokens.shape[1],
  )


def test_any_split_is_one_call():
  model = make()
  rng = np.random.default_rng(0)
  mask = rng.random((2, LENGTH)) < 0.8
  starts = rng.random((2, LENGTH)) < 0.2
  text = np.asarray(tokens())
  whole, _ = run(model, text, mask=mask, starts=starts)
  chex.assert_shape(whole, (2, LENGTH, VOCAB))
  assert not np.any(np.where(mask[..., None], 0, whole))
  for lengths in (lengths_of_pieces(LENGTH), [1, 9, 1, 1, 9, 1]):
    state, parts, begin = model.init_state(2, LENGTH), [], 0
    for length in lengths:
      piece = slice(begin, begin + length)
      logits, state = run(
        model, text[:, piece], state, mask[:, piece], starts[:, piece]
      )
      parts.append(logits)
      begin += length
    parts = np.concatenate(parts, axis=1)
    chex.assert_trees_all_close(parts, whole, atol=1e-4)


def test_state_has_one_entry_per_layer_with_the_batch_first():
  model = make()
  state = model.init_state(3, 12)
  assert len(state) == 4
  assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {3}
  after = jax.eval_shape(run, model, tokens(rows=3), state)[1]
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


def test_scanned_blocks_are_the_blocks_in_order():
  model = make()

  @fast_to_compile
  def unrolled(model, tokens):
    x = model.embedding(tokens)
    for repeat in range(2):
      for block in jax.tree.map(lambda leaf: leaf[repeat], model.blocks):  # noqa: B023
        x, _ = block(x)
    return model.logits(model.norm(x))

  expected, _ = run(model, tokens())
  got = unrolled(model, tokens())
  chex.assert_trees_all_close(got, expected, atol=1e-4)


def lines(config, length):
  """Size of the program of a training step."""

  def loss(model, tokens):
    logits, _ = model(tokens[:, :-1])
    return next_token_loss(logits, tokens[:, 1:])

  model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
  lowered = jax.jit(jax.grad(loss)).lower(
    model, jax.ShapeDtypeStruct((1, length), jnp.int32)
  )
  return len(lowered.as_text().splitlines())


def test_program_size_depends_on_neither_depth_nor_length():
  deep = dataclasses.replace(CONFIG, num_layers=16)
  assert lines(deep, 4097) < 1.05 * lines(CONFIG, 1025)


def test_recomputing_changes_no_gradient():
  policy = jax.checkpoint_policies.save_only_these_names(
    "reads", "segment_ends", "batch_starts"
  )

  def gradient(remat):
    config = dataclasses.replace(SMALL, remat=remat)

    @fast_to_compile
    @jax.grad
    def of_loss(model, tokens):
      return next_token_loss(model(tokens[:, :-1])[0], tokens[:, 1:])

    return jax.tree.leaves(of_loss(make(config), tokens()))

  expected = gradient(False)
  chex.assert_tree_all_finite(expected)
  for remat in (True, policy):
    chex.assert_trees_all_close(gradient(remat), expected, atol=1e-5)


def test_what_is_kept_by_name_is_not_computed_anew():
  memory = Cached(Titans(inner_batch=4), Constant(8), GatedResidual())
  config = ModelConfig.tiny(MemorySpec(memory, 2))

  def products(*names):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    of = dataclasses.replace(config, remat=policy)

    def loss(model, tokens):
      return jnp.sum(model(tokens)[0])

    model = nnx.eval_shape(lambda: LanguageModel(of, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    return str(jax.make_jaxpr(jax.grad(loss))(model, tokens)).count(
      "dot_general["
    )

  assert products("reads", "segment_ends", "batch_starts") < products()


def test_both_modes(nnx_mode):
  model = make(SMALL)
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  @fast_to_compile
  @jax.grad
  def gradient(params, tokens):
    model = nnx.merge(graphdef, params, rest)
    return jnp.sum(jnp.sin(model(tokens)[0]))

  grads = gradient(params, tokens())
  assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(grads))
  chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)


def test_output_layer_is_tied_or_not():
  tied, untied = SMALL, dataclasses.replace(SMALL, tie_embeddings=False)
  names = lambda model: {
    path[0] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))
  }
  assert names(make(tied)) == {"blocks", "embedding", "norm"}
  model = make(untied)
  assert names(model) == {"blocks", "embedding", "head", "norm"}
  x = jnp.ones((1, 1, 8))
  expected = np.sum(np.float64(model.head.kernel[...]), axis=0)
  np.testing.assert_allclose(model.logits(x)[0, 0], expected, atol=1e-5)
  model = make(tied)
  expected = np.sum(np.float64(model.embedding.table[...]), axis=1)
  np.testing.assert_allclose(model.logits(x)[0, 0], expected, atol=1e-5)


def test_initial_scale():
  config = dataclasses.replace(
    SMALL,
    dim=64,
    hidden_dim=64,
    num_layers=8,
    pattern=(*SMALL.pattern, AttentionSpec(2)),
  )
  model = LanguageModel(config, rngs=nnx.Rngs(0))
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    if issubclass(variable.type, NoDecayParam) or "conv" in path[-2]:
      continue
    is_output = path[-2] in ("out", "down")
    expected = 0.02 / 16**0.5 if is_output else 0.02
    np.testing.assert_allclose(np.std(variable[...]), expected, rtol=0.1)
  # The layers are different draws.
  kernel = model.blocks[0].mixer.q.kernel[...]
  assert np.any(kernel[0] != kernel[1])


def test_bfloat16_is_close_with_float32_logits():
  model, low = make(), make(dataclasses.replace(CONFIG, dtype=jnp.bfloat16))
  logits, _ = run(model, tokens())
  low_logits, _ = run(low, tokens())
  assert low_logits.dtype == jnp.float32
  error = np.mean((low_logits - logits) ** 2) / np.mean(logits**2)
  assert error**0.5 < 0.05


def test_segment_gates():
  model = make()
  given = tokens(11)
  gates = fast_to_compile(segment_gates)(model, given)
  assert sorted(gates) == [0, 2]
  for weights in gates.values():
    chex.assert_shape(weights, (2, 11, 2, 3))
    np.testing.assert_allclose(np.sum(weights, -1), 1, atol=1e-5)
    # In the first segment there is only the online memory to read.
    np.testing.assert_allclose(weights[:, :4, :, -1], 1, atol=1e-6)
    assert np.all(weights[:, 4:, :, 0] > 0)


def test_memory_reports():
  """Of a memory that minimises nothing, and a cached one that does.

  Padding counts for nothing.
  """
  deep = Titans(MLP(depth=1), inner_batch=4)
  cached = Cached(deep, Constant(4), GatedResidual())
  pattern = tuple(MemorySpec(m, 2) for m in (Linear(), cached))
  config = dataclasses.replace(CONFIG, pattern=pattern, num_layers=2)
  given = tokens(11)
  report = fast_to_compile(
    lambda model, tokens, mask: memory_reports(model, tokens, mask=mask)
  )
  mask = jnp.broadcast_to(jnp.arange(11) < 7, (2, 11))
  reports = report(make(config), given, mask)
  assert sorted(reports) == [0, 1]
  assert reports[0].inner_loss is None
  assert all(report.state_norm > 0 for report in reports.values())
  assert reports[1].inner_loss > 0
  padding = given.at[:, 7:].set(1)
  chex.assert_trees_all_close(report(make(config), padding, mask), reports)


@pytest.mark.parametrize("token", [-1, VOCAB, 99])
def test_token_ids_out_of_range(token):
  model = make(SMALL)
  wrong = tokens().at[1, 20].set(token)
  with pytest.raises(ValueError, match=rf"0 to 16: got {token} at \(1, 20\)"):
    model(wrong)
  # Under jit their row is nan, and no other.
  logits, _ = run(model, wrong)
  assert np.all(np.isnan(logits[1, 20:]))
  chex.assert_trees_all_equal(logits[0], run(model, tokens())[0][0])
  # As padding they may be anything.
  mask = jnp.ones((2, LENGTH), bool).at[1, 20].set(False)
  logits, _ = run(model, wrong, mask=mask)
  chex.assert_trees_all_equal(logits, run(model, tokens(), mask=mask)[0])


def test_wrong_kinds_of_arguments(as_a_user):
  model = make()
  ids = jnp.zeros((1, 3), jnp.int32)
  state = model.init_state(1, 8)

  def check(message, tokens=ids, state=None, **flags):
    with pytest.raises(ValueError, match=message):
      model(tokens, state, **flags)

  check("integer dtype: got float32", jnp.zeros((1, 3)))
  check("`tokens` must be an array: got None", None)
  check("`tokens` must have at least one row", ids[:0])
  check("`tokens` must be an array .* got a list", [[1, 2]])
  check("`mask` must be an array .* got a list", mask=[[True] * 3])
  check("`mask` must be boolean: got float32", mask=jnp.ones((1, 3)))
  check("`starts` must be boolean: got int32", starts=ids)
  check("`state` must be a tuple .*: got a list", state=list(state))
  check("`state` must be a tuple .*: got a tuple of 1", state=state[:1])
  check("`state` must be the MixerState", state=state[::-1])


def test_ids_of_numpy(as_a_user):
  """Its int64 is what it makes of a list."""
  model = make(SMALL)
  ids = np.array([[1, 2, 3]])
  assert ids.dtype == np.int64
  x = model.embedding(ids)
  chex.assert_trees_all_equal(x, model.embedding(jnp.asarray(ids)))
