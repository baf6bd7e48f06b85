"""Deep memories: identities, stability, and how they are watched."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.caching import Cached, Constant, GatedResidual, MemorySoup
from memcache_jax.memories import (
  TTTMLP,
  Atlas,
  DeepLinear,
  DeepSlidingWindow,
  HeadShape,
  Miras,
  Moneta,
  Optimizer,
  PolynomialFeatures,
  Retention,
  Titans,
  Tokens,
  TTTLinear,
  Yaad,
  watch,
)
from memcache_jax.ops.mlp_memory import MLP, GatedMLP, Huber, MuonClosing
from memcache_jax.testing import assert_close, random_tokens, take

SHAPE = HeadShape(1, 4, 4)


def make(memory, length, shape=SHAPE, **kwargs):
  """Tokens without masks and documents."""
  tokens = random_tokens(memory, shape, 1, length, **kwargs)
  return replace(tokens, mask=None, starts=None)


def test_polynomial_features():
  x = jnp.asarray([[[[2.0, 3.0]]]])
  powers, cross = PolynomialFeatures(2), PolynomialFeatures(2, cross=True)
  factors = powers.init_params(1)
  assert (powers.width(2), cross.width(2)) == (4, 5)
  assert powers(factors, x)[0, 0, 0].tolist() == [2.0, 3.0, 2.0, 4.5]
  assert cross(factors, x)[0, 0, 0].tolist() == [2.0, 3.0, 2.0, 3.0, 4.5]


def test_soup_of_deep_memories_and_gradients_through_the_cache():
  """Soup is not the gated sum, but is the memory itself in one segment.

  And a read in the last segment teaches the writes of the first.
  """
  memory = DeepLinear(MLP(hidden_factor=1, norm=False), inner_batch=4)
  soup, gated, one = (
    Cached(memory, Constant(length), aggregate)
    for length, aggregate in (
      (4, MemorySoup()),
      (4, GatedResidual()),
      (12, MemorySoup()),
    )
  )
  params = memory.init_params(jax.random.key(0), SHAPE)
  tokens = make(soup, 12)
  bare = replace(tokens, gates={"step": tokens.gates["step"]})

  def late(v):
    y, _ = gated.scan(params, None, replace(tokens, v=v))
    return jnp.sum(jnp.sin(y[:, 8:]))

  @jax.jit
  def run():
    y = [m.scan(params, None, tokens)[0] for m in (soup, gated, one)]
    return *y, memory.scan(params, None, bare)[0], jax.grad(late)(tokens.v)

  y_soup, y_gated, y_one, y_bare, gradient = run()
  assert_close(y_one, y_bare)
  assert_close(y_soup[:, :4], y_gated[:, :4])
  assert np.max(np.abs(y_soup - y_gated)[:, 4:]) > 1e-3
  assert np.all(np.max(np.abs(gradient[0, :4, 0]), axis=-1) > 1e-6)


def test_default_steps_are_those_known_to_be_stable():
  bare = MLP(norm=False)
  scales = {
    Titans(): 0.1,
    Titans(bare): 0.05,
    Titans(bare, step_scale=3.0): 3.0,
    Yaad(): 1.0,
    Yaad(bare): 0.5,
    DeepLinear(): 1.0,
    DeepLinear(bare): 0.25,
    DeepSlidingWindow(bare, window=5): 0.25 / 5,
    TTTLinear(): 16.0,  # its own coefficients divide
    TTTMLP(): 1.6,
  }
  for memory, scale in scales.items():
    assert memory.gates()["step"].scale == pytest.approx(scale / 16), memory


@pytest.mark.parametrize(
  "memory",
  [Titans(MLP(depth=4)), DeepLinear(), Titans(MLP(depth=1, norm=False))],
  ids=["titans4", "dla2", "titans1_no_norm"],
)
def test_long_input_stays_bounded(memory):
  """Default options, largest steps, momentum 0.9, values a hundred times
  too large, and nothing forgotten.
  """
  shape = HeadShape(1, 8, 8)
  params = memory.init_params(jax.random.key(0), shape)
  scan = jax.jit(memory.scan)
  norm = lambda state: max(
    float(jnp.linalg.norm(w)) for w in state.theta.values()
  )
  tokens = make(memory, 4096, shape)
  hardest = {
    "step": memory.gates()["step"].scale,
    "momentum": 0.9,
    "log_decay": 0.0,
  }
  gates = {n: jnp.full_like(x, hardest[n]) for n, x in tokens.gates.items()}
  early = jnp.arange(4096)[None] < 256
  for factor in (1.0, 10.0, 100.0):
    scaled = replace(
      tokens, v=factor * tokens.v, gates=gates, mask=jnp.ones_like(early)
    )
    first = norm(scan(params, None, replace(scaled, mask=early))[1])
    y, state = scan(params, None, scaled)
    chex.assert_tree_all_finite((y, state))
    assert norm(state) <= 100 * first


def test_watching():
  """The inner loss at the weights its gradient is taken at, and the norm."""
  memory = Titans(MLP.matrix(), inner_batch=2)
  cached = Cached(memory, Constant(2), GatedResidual())
  params = memory.init_params(jax.random.key(0), SHAPE)
  tokens = make(cached, 4)
  bare = replace(
    tokens, gates={name: tokens.gates[name] for name in memory.gates()}
  )

  @jax.jit
  def run():
    first = memory.scan(params, None, take(bare, 0, 2))[1]
    last = memory.scan(params, first, take(bare, 2, 4))[1]
    return (
      (first.theta["w"], last.theta["w"]),
      watch(memory, params, bare),
      watch(cached, params, tokens),
    )

  (first, last), watched, in_segments = run()
  starts = jnp.stack([params["w"], params["w"], first[0], first[0]])
  error = jnp.einsum("tnk,tnkv->tnv", tokens.k[0], starts) - tokens.v[0]
  assert_close(watched.inner_loss[0], 0.5 * np.sum(error**2, axis=-1))
  assert_close(watched.norm[:, -1], jnp.linalg.norm(last, axis=(-2, -1)))
  # A new segment learns from the initial weights again.
  error = jnp.einsum("tnk,nkv->tnv", tokens.k[0], params["w"]) - tokens.v[0]
  assert_close(in_segments.inner_loss[0], 0.5 * np.sum(error**2, axis=-1))


def test_steps_descend():
  """The error at a repeated key falls, which the printed signs would raise."""
  memory = Titans(MLP(norm=False), inner_batch=4)
  params = memory.init_params(jax.random.key(0), SHAPE)
  tokens = make(memory, 24)
  k, v = (jnp.broadcast_to(x[:, :1], x.shape) for x in (tokens.k, tokens.v))
  gate = lambda value: jnp.full((1, 24, 1), value)
  gates = {"step": 0.125, "momentum": 0.5, "log_decay": 0.0}
  gates = {name: gate(value) for name, value in gates.items()}
  y, _ = jax.jit(memory.scan)(params, None, Tokens(k, k, v, gates))
  error = np.sum((y - v) ** 2, axis=(0, 2, 3))
  assert error[-1] < 0.8 * error[0]


def test_ttt_rates_are_those_of_its_code():
  """`rows` is `pairs` with max(1/r + bias_r, 0) step_j / k."""
  rows = TTTLinear(inner_batch=4)
  pairs = replace(rows, optimizer=Optimizer(restart="pairs"))
  params = rows.init_params(jax.random.key(0), SHAPE)
  bias = jnp.asarray([[0.1, -0.2, 0.3, -1.0]], jnp.float32)
  tokens = make(rows, 8)
  step = np.asarray(tokens.gates["step"]).reshape(2, 4)
  rate = np.maximum(1 / np.arange(1.0, 5.0) + np.asarray(bias[0]), 0)
  coef = jnp.asarray(np.einsum("r,gj->grj", rate, step) / 4, jnp.float32)
  given = replace(tokens, gates={"coef": coef.reshape(1, 8, 1, 4)})
  network = {name: x for name, x in params.items() if name != "row_bias"}

  @jax.jit
  def both():
    y, state = rows.scan(params | {"row_bias": bias}, None, tokens)
    want, last = pairs.scan(network, None, given)
    return (y, state.theta), (want, last.theta)

  assert_close(*both())


def test_compositions():
  memory = Miras(
    GatedMLP(), Huber(), Retention(norm=3.0), Optimizer(momentum=True), window=2
  )
  assert memory.gates()["step"].width == 2
  assert sorted(memory.gates()) == [
    "log_decay",
    "momentum",
    "step",
    "threshold",
  ]
  assert hash(memory) == hash(replace(memory))
  with pytest.raises(ValueError, match="`norm` and `entropy`"):
    Retention(norm=4.0, entropy=True)
  with pytest.raises(ValueError, match="`retention`"):
    Atlas(retention=Retention(norm=4.0))
  with pytest.raises(ValueError, match="window=2"):
    TTTLinear(window=2)
  with pytest.raises(ValueError, match="`restart`"):
    Optimizer(muon=MuonClosing(), restart="rows")
  with pytest.raises(ValueError, match="`inner_batch`"):
    Titans(inner_batch=0)
  for wrong in (-1.0, 0.0, float("nan")):
    with pytest.raises(ValueError, match="`step_scale` must be a number"):
      Moneta(step_scale=wrong)


def test_a_state_grows_by_one_memory_per_segment_only():
  """And keeps its shape from token to token, so that decoding compiles once."""
  memory = Titans(MLP.matrix())
  cached = Cached(memory, Constant(256), GatedResidual())
  params = memory.init_params(jax.random.key(0), SHAPE)
  count = lambda tree: sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )

  def state_of(length):
    return jax.eval_shape(
      lambda: cached.init_state(params, SHAPE, 1, max_length=length)
    )

  states = {length: state_of(length) for length in (1024, 4096, 16384)}
  one = count(jax.eval_shape(memory.snapshot, states[1024].online))
  one += 4 * (SHAPE.key_dim + 1)  # its pooled key and its number
  for length in (4096, 16384):
    more = (length - 1024) // 256
    assert count(states[length]) == count(states[1024]) + more * one
  token, state = make(cached, 1), states[4096]
  step = jax.eval_shape(lambda s: cached.scan(params, s, token)[1], state)
  chex.assert_trees_all_equal_shapes_and_dtypes(step, state)
