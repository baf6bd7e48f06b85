import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.layers import Gates, NoDecayParam
from memcache_jax.memories import Gate, HeadShape

SHAPE = HeadShape(64, 3, 5)
ALL = {
  "decay": Gate("log_decay"),
  "write": Gate("dt"),
  "step": Gate("sigmoid", width=2, bias=(2.0, -2.0), scale=0.5),
  "momentum": Gate("sigmoid", bias=1.0),
  "slots": Gate("linear", width=4, bias=3.0),
  "u": Gate("connector"),
}


def make(gates=ALL, **options):
  return Gates(8, SHAPE, gates, rngs=nnx.Rngs(0), **options)


def test_shapes_and_float32_whatever_the_compute_dtype():
  gates = make(dtype=jnp.bfloat16)(jnp.ones((2, 7, 8), jnp.bfloat16))
  shapes = {name: gate.shape[2:] for name, gate in gates.items()}
  assert shapes == {
    "decay": (64,),
    "write": (64,),
    "step": (64, 2),
    "momentum": (64,),
    "slots": (64, 4),
    "u": (64, 3),
  }
  assert {gate.dtype for gate in gates.values()} == {jnp.dtype("float32")}


def test_formulas():
  gates = make()
  h = np.random.default_rng(0).normal(size=(2, 7, 8))
  got = gates(jnp.asarray(h, jnp.float32))

  def product(name):
    part = gates.projections[name]
    kernel = getattr(part, "projection", part).kernel[...]
    axes = "dnk"[: kernel.ndim]
    return np.einsum(f"btd,{axes}->bt{axes[1:]}", h, np.float64(kernel))

  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  decay = gates.projections["decay"]
  dt = np.log1p(np.exp(product("decay") + np.float64(decay.dt_bias[...])))
  expected = {
    "decay": -np.exp(np.float64(decay.A_log[...])) * dt,
    "write": dt,
    "step": 0.5 * sigmoid(product("step") + np.array([2.0, -2.0])),
    "momentum": sigmoid(product("momentum") + 1.0),
    "slots": product("slots") + 3.0,
    "u": product("u"),
  }
  for name, value in expected.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


def test_initial_ranges():
  gates = make()
  at_zero = gates(jnp.zeros((1, 1, 8)))
  dt = np.asarray(at_zero["write"])
  assert np.all((dt >= 0.999e-3) & (dt <= 0.1001))
  # Uniform in the logarithm: half of them below the geometric mean.
  assert 0.3 < np.mean(dt < 0.01) < 0.7
  rate = np.asarray(-at_zero["decay"] / at_zero["write"])
  assert np.all((rate > 0) & (rate <= 16))
  assert 6 < np.mean(rate) < 10
  kernel = gates.projections["u"].kernel[...]
  assert 0.018 < np.std(kernel) < 0.022


def test_no_input_makes_a_gate_or_its_gradient_infinite():
  gates = make({"decay": Gate("log_decay"), "write": Gate("dt")})

  def total(x):
    made = gates(x * jnp.ones((1, 1, 8)))
    return jnp.sum(jnp.exp(made["decay"])) + jnp.sum(made["write"]), made

  for size in (0.0, 1e3, -1e3, 1e6):
    grads, made = jax.grad(total, has_aux=True)(size)
    chex.assert_tree_all_finite((grads, made))
    assert np.all(made["decay"] <= 0)
    assert np.all(made["write"] >= 0)


def test_what_must_not_decay_is_marked():
  params = nnx.state(make(), NoDecayParam)
  names = sorted(path[-1] for path, _ in nnx.to_flat_state(params))
  assert names == ["A_log", "bias", "bias", "bias", "dt_bias"]


def test_errors(as_a_user):
  with pytest.raises(ValueError, match=r"`gates\['x'\].kind` .*got 'tanh'"):
    make({"x": Gate("tanh")})
  with pytest.raises(ValueError, match="exactly one 'log_decay' .* got 0"):
    make({"write": Gate("dt")})
