"""The gated read on rows and heads spread over devices: nothing is gathered."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.caching import Cached, Constant, SparseSelective
from memcache_jax.caching._aggregators import Selection
from memcache_jax.caching._sparse_read import read_selected
from memcache_jax.memories import HeadShape, Linear
from memcache_jax.ops import cache_read
from memcache_jax.testing import assert_close, random_tokens


def _all(implementation, q, states, weights):
  return cache_read(q, states, weights, implementation=implementation)


def _selected(implementation, q, states, weights):
  """The first ones, but for a few tokens."""
  index = jnp.zeros_like(weights[..., :2], jnp.int32)
  index += jnp.arange(2).reshape(1, 1, 1, 2)
  index = jnp.where(weights[..., :2] > 1, -1, index)
  memory = Linear(implementation=implementation)
  selection = Selection(index, weights[..., :2], own=weights[..., 2])
  return read_selected(memory, {}, states, q, selection)


def _step(read, implementation):
  def loss(*inputs):
    y = read(implementation, *inputs)
    return jnp.sum(jnp.sin(y)), y

  return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def _mesh():
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=kinds)
  return mesh, jax.NamedSharding(mesh, jax.P("data", None, "heads"))


@pytest.mark.parametrize(
  ("read", "implementation"),
  [(_all, "mosaic_tpu"), (_selected, "mosaic_tpu"), (_selected, "xla")],
)
def test_rows_and_heads_over_eight_devices(read, implementation):
  rng = np.random.default_rng(0)
  normal = lambda *axes: rng.standard_normal(axes).astype(np.float32)
  inputs = normal(4, 9, 2, 32), normal(4, 3, 2, 32, 32), normal(4, 9, 2, 3)
  expected = jax.device_get(_step(read, "xla")(*inputs))
  mesh, place = _mesh()
  simulated = pltpu.InterpretParams(uninitialized_memory="nan")
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode(simulated):
    spread = jax.device_put(inputs, place)
    compiled = _step(read, implementation).lower(*spread).compile()
    got = compiled(*spread)
  assert_close(jax.device_get(got), expected)
  assert got[1].sharding.spec[:3] == ("data", None, "heads")
  assert "all-gather" not in compiled.as_text()
  assert "all-to-all" not in compiled.as_text()


def test_blocks_of_heads_over_devices():
  memory = Cached(Linear(), Constant(2), SparseSelective(1, block=2))
  tokens = random_tokens(memory, HeadShape(2, 4, 3), 4, 5)
  tokens = replace(tokens, mask=None, starts=None)
  scan = jax.jit(lambda tokens: memory.scan({}, None, tokens)[1].chosen)
  mesh, place = _mesh()
  with jax.set_mesh(mesh):
    got = jax.device_get(scan(jax.device_put(tokens, place)))
  np.testing.assert_array_equal(got, scan(tokens))
  assert np.any(got >= 0)
