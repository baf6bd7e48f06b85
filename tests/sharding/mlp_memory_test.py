"""Inner batches on rows and heads spread over devices: nothing is gathered."""

import functools

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.ops.mlp_memory import L2, MLP, mlp_memory
from memcache_jax.testing import assert_close


def test_rows_and_heads_over_eight_devices():
  rng = np.random.default_rng(0)
  normal = lambda *axes: rng.standard_normal(axes).astype(np.float32) / 4
  network = MLP(depth=1, bias=True, norm=False)
  x, params = (
    normal(4, 7, 2, 32),
    network.init_params(jax.random.key(0), 2, 32, 32),
  )
  step = np.full((4, 7, 2, 1), 0.1, np.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def run(implementation, x, step, params):
    y, state = mlp_memory(
      *(x, x, x, params),
      architecture=network,
      loss=L2(),
      inner_batch=3,
      step=step,
      implementation=implementation,
    )
    return y, state.theta

  expected = jax.device_get(run("xla", x, step, params))
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=kinds)
  place = jax.NamedSharding(mesh, jax.P("data", None, "heads"))
  simulated = pltpu.InterpretParams(uninitialized_memory="nan")
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode(simulated):
    inputs = jax.device_put((x, step), place)
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P("heads")))
    compiled = run.lower("mosaic_tpu", *inputs, params).compile()
    got = compiled(*inputs, params)
  assert_close(jax.device_get(got), expected)
  assert got[0].sharding.spec[:3] == ("data", None, "heads")
  assert "all-gather" not in compiled.as_text()
  assert "all-to-all" not in compiled.as_text()
