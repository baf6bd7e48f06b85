"""The kernels compile for every TPU: tiles, fast memory, supported ops."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memcache_jax.ops import cached_linear_attention

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# Head width, segment length, segments, what else.
CASES = {
  "plain_256": (256, 256, 8, {}),
  "streamed_128": (128, 256, 512, {}),
  "carried_128": (128, 512, 3, {"decay": 1, "write_mode": "checkpoint"}),
  "short_96": (96, 16, 20, {"decay": 1, "dtype": jnp.float32}),
  "odd_64": (64, 48, 9, {"decay": 1, "write_mode": "checkpoint"}),
}


def _arguments(sharding, width, length, segments, dtype, decay):
  b, t, n, carried = 1, length * segments, 2, 2 * decay
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding
  )
  arrays = {name: array(b, t, n, width, dtype=dtype) for name in "qkv"}
  arrays["weights"] = array(b, t, n, carried + segments)
  arrays["own_weight"] = array(b, t, n)
  if decay:
    arrays["log_decay"] = arrays["write"] = arrays["own_weight"]
    arrays["memories"] = array(b, carried, n, width, width)
    arrays["state"] = array(b, n, width, width)
  return arrays


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("name", CASES)
def test_compiles(name, chip):
  width, length, segments, options = CASES[name]
  options = {"decay": 0, "dtype": jnp.bfloat16, **options}
  decay, dtype = options.pop("decay"), options.pop("dtype")
  device = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGIES[chip]
  ).devices[0]
  arrays = _arguments(
    SingleDeviceSharding(device), width, length, segments, dtype, decay
  )

  def loss(arrays):
    y, ends = cached_linear_attention(
      **arrays,
      segment_length=length,
      implementation="mosaic_tpu",
      **options,
    )
    return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(ends**2)

  text = jax.jit(jax.grad(loss)).lower(arrays).compile().as_text()
  for kernel in ("fwd", "bwd"):
    assert f"memcache_cached_linear_attention_{kernel}" in text
