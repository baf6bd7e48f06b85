"""The chunked gated read against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from memcache_jax.ops import cache_read
from memcache_jax.ops.cache_read import _selected_tiles
from memcache_jax.ops.cache_read._plan import make_plan
from memcache_jax.testing import assert_close


def _inputs(t, s, dtype=jnp.float32):
  rng = np.random.default_rng(t)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  q = normal(2, t, 3, 6).astype(dtype)
  return q, normal(2, s, 3, 6, 5), jnp.abs(normal(2, t, 3, s))


def _run(inputs, **options):
  def loss(q, states, weights):
    y = cache_read(q, states, weights, **options)
    return jnp.sum(jnp.sin(y)), y

  run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  return run(*inputs)


@pytest.mark.parametrize(("t", "s"), [(1, 4), (7, 1), (33, 5), (32, 2)])
def test_equals_the_definition(t, s):
  inputs = _inputs(t, s)
  got = _run(inputs, chunk_size=8)
  expected = _run(inputs, implementation="reference")
  assert_close(got, expected)


def test_bfloat16_queries():
  q, states, weights = _inputs(16, 4, jnp.bfloat16)
  y = cache_read(q, states, weights)
  assert y.dtype == jnp.float32
  exact = cache_read(q.astype(jnp.float32), states, weights)
  assert_close(y, exact, 1e-2)


def test_nothing_to_read():
  q, states, weights = _inputs(4, 3)
  assert not np.any(cache_read(q, states[:, :0], weights[..., :0]))
  assert cache_read(q[:, :0], states, weights[:, :0]).shape == (2, 0, 3, 5)


def test_no_array_of_tokens_times_memory():
  """Nothing of the size tokens x parameters, forwards or backwards."""
  q, states, weights = _inputs(64, 4)

  def loss(*inputs):
    return jnp.sum(jnp.sin(cache_read(*inputs, chunk_size=8)))

  jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, states, weights)
  largest = max(
    var.aval.size
    for eqn in _equations(jaxpr.jaxpr)
    for var in eqn.outvars
    if hasattr(var.aval, "size")
  )
  assert largest < 64 * states[0, 0].size


def _equations(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jaxprs_in_params(eqn.params):
      yield from _equations(inner)


@pytest.mark.usefixtures("as_a_user")
def test_wrong_shapes():
  q, states, weights = _inputs(4, 3)
  with pytest.raises(ValueError, match="`weights` must have axes"):
    cache_read(q, states, weights[..., :2])


def test_a_plan_gives_every_pair_a_place():
  slots, tile, shape = 6, 4, (2, 11, 2, 2)
  rng = np.random.default_rng(0)
  # Two memories are never selected, the last one among them.
  index = np.array([0, 1, 3, 4])[rng.random((*shape[:3], 4)).argsort(-1)]
  index = np.where(rng.random(shape) < 0.2, -1, index[..., :2])
  plan = jax.jit(lambda index: make_plan(index, slots, tile))(index)
  memory, pair, place = np.swapaxes(plan.memory, 1, 2), plan.pair, plan.place
  for row, head in np.ndindex(shape[0], shape[2]):
    chosen = index[row, :, head].reshape(-1)
    here, there = np.asarray(pair[row, head]), np.asarray(place[row, head])
    np.testing.assert_array_equal(there >= 0, chosen >= 0)
    np.testing.assert_array_equal(
      here[there[chosen >= 0]], np.flatnonzero(chosen >= 0)
    )
    assert np.sum(here >= 0) == np.sum(chosen >= 0)
    tiles = memory[row, head]
    np.testing.assert_array_equal(
      tiles[there[chosen >= 0] // tile], chosen[chosen >= 0]
    )
    assert np.all(np.diff(tiles) >= 0)


def test_heads_in_turn_are_heads_together(monkeypatch):
  """A CPU takes them in turn, other platforms together."""
  rng = np.random.default_rng(0)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  q, states = normal(2, 40, 3, 4), normal(2, 5, 3, 4, 2)
  weights = normal(2, 40, 3, 2)
  index = rng.random((2, 40, 3, 5)).argsort(-1)[..., :2]
  index[rng.random(index.shape) < 0.2] = -1
  index, g = jnp.asarray(index, jnp.int32), normal(2, 40, 3, 2)

  def both(q, states, weights):
    read = lambda *x: _selected_tiles.selected_read(x[0], x[1], index, x[2])
    y, pull = jax.vjp(read, q, states, weights)
    return y, pull(g)

  in_turn = jax.jit(both)(q, states, weights)
  monkeypatch.setattr(
    jax.lax, "platform_dependent", lambda *x, cpu, default: default(*x)
  )
  assert_close(jax.jit(lambda *x: both(*x))(q, states, weights), in_turn)
