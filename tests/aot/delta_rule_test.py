"""The kernels compile for every TPU: tiles, fast memory, supported ops."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memcache_jax.ops import delta_rule

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# Chip, key width, value width, heads, dtype, whether documents start; all of
# them on all chips would take a minute.
CASES = [
  ("v5e", 128, 128, 2, jnp.bfloat16, True),
  ("v5p", 256, 256, 8, jnp.bfloat16, False),
  ("v6e", 96, 64, 1, jnp.float32, True),
  ("v5e", 256, 256, 1, jnp.float32, True),
  ("v5p", 64, 64, 4, jnp.bfloat16, True),
  ("v6e", 96, 96, 3, jnp.bfloat16, False),
]


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(("chip", "k", "v", "n", "dtype", "documents"), CASES)
def test_compiles(chip, k, v, n, dtype, documents):
  device = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGIES[chip]
  ).devices[0]
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=SingleDeviceSharding(device)
  )
  t = 300
  arrays = {name: array(1, t, n, k, dtype=dtype) for name in "qk"}
  arrays |= {"v": array(1, t, n, v, dtype=dtype), "beta": array(1, t, n)}
  starts = None
  if documents:
    arrays |= {"log_decay": array(1, t, n), "initial": array(n, k, v)}
    starts = array(1, t, dtype=jnp.bool_)

  def loss(arrays, starts):
    y, state = delta_rule(**arrays, starts=starts, implementation="mosaic_tpu")
    return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(state**2)

  text = jax.jit(jax.grad(loss)).lower(arrays, starts).compile().as_text()
  for kernel in ("fwd", "states", "bwd"):
    assert f"memcache_delta_rule_{kernel}" in text
