"""The delta rule on rows and heads spread over devices: nothing is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.ops import delta_rule
from memcache_jax.testing import assert_close

B, T, N, D = 4, 9, 2, 32
PLACES = {
  "state": jax.P("data", "heads"),
  "initial": jax.P("heads"),
  "starts": jax.P("data"),
}


def _arrays():
  rng = np.random.default_rng(0)
  normal = lambda *axes: rng.standard_normal(axes).astype(np.float32)
  arrays = {name: normal(B, T, N, D) / D**0.5 for name in "qkv"}
  arrays["beta"] = rng.random((B, T, N)).astype(np.float32)
  arrays["log_decay"] = -np.abs(normal(B, T, N))
  arrays["state"] = normal(B, N, D, D)
  arrays["initial"] = normal(N, D, D)
  return arrays, rng.random((B, T)) < 0.2


def _step(implementation):
  def loss(arrays, starts):
    y, state = delta_rule(
      **arrays, starts=starts, implementation=implementation
    )
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(state)), y

  return jax.jit(jax.grad(loss, has_aux=True))


def test_rows_and_heads_over_eight_devices():
  arrays, starts = _arrays()
  expected = jax.device_get(_step("xla")(arrays, starts))
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=kinds)
  place = lambda x, name: jax.device_put(
    x,
    jax.NamedSharding(mesh, PLACES.get(name, jax.P("data", None, "heads"))),
  )
  simulated = pltpu.InterpretParams(uninitialized_memory="nan")
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode(simulated):
    spread = {name: place(x, name) for name, x in arrays.items()}
    args = spread, place(starts, "starts")
    compiled = _step("mosaic_tpu").lower(*args).compile()
    got = compiled(*args)
  assert_close(jax.device_get(got), expected)
  assert got[1].sharding.spec[:3] == ("data", None, "heads")
  assert got[0]["initial"].sharding.spec[:1] == ("heads",)
  assert "all-gather" not in compiled.as_text()
  assert "all-to-all" not in compiled.as_text()
