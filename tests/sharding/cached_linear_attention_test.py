"""The kernels on rows and heads spread over devices: nothing is gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.ops import cached_linear_attention
from memcache_jax.testing import assert_close

B, T, N, D, LENGTH = 4, 33, 2, 32, 16
PLACES = {
  "q": jax.P("data", None, "heads"),
  "log_decay": jax.P("data", None, "heads"),
  "state": jax.P("data", "heads"),
}
RUN = functools.partial(cached_linear_attention, segment_length=LENGTH)


def _arrays():
  rng = np.random.default_rng(0)
  normal = lambda *axes: rng.standard_normal(axes).astype(np.float32)
  arrays = {name: normal(B, T, N, D) for name in "qkv"}
  arrays["weights"] = normal(B, T, N, 3)
  arrays["own_weight"] = normal(B, T, N)
  arrays["log_decay"] = -np.abs(normal(B, T, N))
  arrays["state"] = normal(B, N, D, D)
  return arrays


def _step(run):
  def loss(arrays, scale):
    y, ends = run(**{**arrays, "v": scale * arrays["v"]})
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(ends)), y

  # The scale is a parameter that all devices share.
  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def _interpreted(step, *args):
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ):
    return step.lower(*args).compile()


@functools.cache
def _on_one_device():
  arrays, scale = _arrays(), jnp.float32(1.5)
  step = _step(functools.partial(RUN, implementation="xla"))
  return arrays, scale, step(arrays, scale)


@pytest.mark.parametrize("axis_type", ["Explicit", "Auto"])
def test_rows_and_heads_over_eight_devices(axis_type):
  arrays, scale, expected = _on_one_device()
  run = functools.partial(RUN, implementation="mosaic_tpu")
  kind = getattr(jax.sharding.AxisType, axis_type)
  mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=(kind, kind))
  specs = {name: PLACES.get(name, PLACES["q"]) for name in arrays}
  if axis_type == "Auto":
    # Here the caller says what is spread how.
    outputs = (PLACES["q"], PLACES["q"])
    local = jax.shard_map(
      lambda arrays, kernel=run: kernel(**arrays),
      mesh=mesh,
      in_specs=(specs,),
      out_specs=outputs,
      check_vma=False,
    )
    run = lambda **arrays: local(arrays)
  with jax.set_mesh(mesh):
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    spread = {name: place(x, specs[name]) for name, x in arrays.items()}
    compiled = _interpreted(_step(run), spread, place(scale, jax.P()))
    got = compiled(spread, place(scale, jax.P()))
  assert_close(jax.device_get(got), jax.device_get(expected))
  assert got[0][1].sharding.spec[:3] == ("data", None, "heads")
  text = compiled.as_text()
  assert "all-gather" not in text
  assert "all-to-all" not in text


def test_tokens_over_devices_are_refused():
  mesh = jax.make_mesh(
    (8,), ("tokens",), axis_types=(jax.sharding.AxisType.Explicit,)
  )
  place = jax.NamedSharding(mesh, jax.P(None, "tokens"))
  arrays = {k: jnp.zeros((1, 128, *x.shape[2:])) for k, x in _arrays().items()}
  arrays["weights"] = jnp.zeros((1, 128, N, 8))
  del arrays["state"]
  arrays = {k: jax.device_put(x, place) for k, x in arrays.items()}
  with (
    jax.set_mesh(mesh),
    pytest.raises(ValueError, match="rows .b. and heads"),
  ):
    RUN(**arrays, implementation="mosaic_tpu")
