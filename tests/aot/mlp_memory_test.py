"""Inner batches of networks compile for every TPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memcache_jax.ops.mlp_memory import L2, MLP, GatedMLP, mlp_memory

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# Architecture, inner batch, width, dtype.
CASES = {
  "mlp_128": (MLP(bias=True), 16, 128, jnp.bfloat16),
  "gated_96": (GatedMLP(residual=True, norm=True), 20, 96, jnp.float32),
}


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("name", CASES)
def test_inner_batches_compile(name, chip):
  architecture, inner_batch, width, dtype = CASES[name]
  device = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGIES[chip]
  ).devices[0]

  def array(*shape, dtype=jnp.float32):
    sharding = SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  params = jax.eval_shape(
    lambda: architecture.init_params(jax.random.key(0), 2, width, width)
  )
  params = {name: array(*x.shape) for name, x in params.items()}
  t = 4 * inner_batch

  def run(x, params, step, gate):
    return mlp_memory(
      *(x, x, x, params),
      architecture=architecture,
      loss=L2(),
      inner_batch=inner_batch,
      step=step,
      log_decay=gate,
      momentum=gate,
      implementation="mosaic_tpu",
    )

  arrays = array(1, t, 2, 1), array(1, t, 2)
  x = array(1, t, 2, width, dtype=dtype)
  text = jax.jit(run).lower(x, params, *arrays).compile().as_text()
  assert "memcache_mlp_memory_batches" in text
