"""The gated read compiles for every TPU: tiles, fast memory, supported ops."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memcache_jax.ops import cache_read

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# Tokens, states, widths, dtype.
CASES = {
  "streamed_256": (2000, 100, 256, 256, jnp.bfloat16),
  "odd_96": (300, 11, 96, 64, jnp.float32),
  "wide_128": (1024, 16, 128, 512, jnp.bfloat16),
}


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("name", CASES)
def test_compiles(name, chip):
  t, s, k, v, dtype = CASES[name]
  device = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGIES[chip]
  ).devices[0]
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=SingleDeviceSharding(device)
  )
  arrays = array(1, t, 2, k, dtype=dtype), array(1, s, 2, k, v)

  def loss(*inputs):
    return jnp.sum(cache_read(*inputs, implementation="mosaic_tpu") ** 2)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  compiled = gradient.lower(*arrays, array(1, t, 2, s)).compile()
  for kernel in ("fwd", "bwd_tokens", "bwd_states"):
    assert f"memcache_cache_read_{kernel}" in compiled.as_text()
