"""The gated read on rows and heads spread over devices: nothing is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.caching._aggregators import Selection
from memcache_jax.caching._sparse_read import read_selected
from memcache_jax.memories import Linear
from memcache_jax.ops import cache_read
from memcache_jax.testing import assert_close


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


@pytest.mark.parametrize("read", [_all, _selected])
def test_rows_and_heads_over_eight_devices(read):
  rng = np.random.default_rng(0)
  normal = lambda *axes: rng.standard_normal(axes).astype(np.float32)
  inputs = normal(4, 9, 2, 32), normal(4, 3, 2, 32, 32), normal(4, 9, 2, 3)
  expected = jax.device_get(_step(read, "xla")(*inputs))
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=kinds)
  place = jax.NamedSharding(mesh, jax.P("data", None, "heads"))
  simulated = pltpu.InterpretParams(uninitialized_memory="nan")
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode(simulated):
    spread = jax.device_put(inputs, place)
    compiled = _step(read, "mosaic_tpu").lower(*spread).compile()
    got = compiled(*spread)
  assert_close(jax.device_get(got), expected)
  assert got[1].sharding.spec[:3] == ("data", None, "heads")
  assert "all-gather" not in compiled.as_text()
  assert "all-to-all" not in compiled.as_text()
