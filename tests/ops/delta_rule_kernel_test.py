"""The delta rule as kernels for TPUs and GPUs, against its definition."""

import functools
import importlib
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from memcache_jax.memories import RWKV7, GatedDelta, HeadShape
from memcache_jax.ops import delta_rule
from memcache_jax.testing import assert_close, random_tokens, relative_error

# Kernels are simulated.
pytestmark = pytest.mark.slow

KERNELS = "memcache_jax.pallas_kernels.delta_rule"
TRITON = (
  *("solve", "chain", "read"),
  *("read_vjp", "chain_vjp", "tokens_vjp", "initial_vjp"),
)


def _inputs(t, k, v, dtype=jnp.float32, b=1):
  """Everything the op takes, with gates of exactly 0 and 1 among them."""
  rng = np.random.default_rng(t)
  normal = lambda *axes: rng.standard_normal(axes)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  decay = rng.exponential(0.3, (b, t, 2))
  decay = np.where(rng.random(decay.shape) < 0.05, np.inf, decay)
  floats = {
    "q": unit(normal(b, t, 2, k)),
    "k": unit(normal(b, t, 2, k)),
    "v": normal(b, t, 2, v),
    "beta": np.clip(2.4 * rng.random((b, t, 2)) - 0.2, 0, 2),
    "log_decay": -np.where(rng.random(decay.shape) < 0.1, 0.0, decay),
    "state": normal(b, 2, k, v),
    "initial": normal(2, k, v),
  }
  floats = {
    name: jnp.asarray(x, dtype if name in "qkv" else jnp.float32)
    for name, x in floats.items()
  }
  flags = {
    "mask": jnp.asarray(rng.random((b, t)) < 0.8),
    "starts": jnp.asarray(rng.random((b, t)) < 0.02),
  }
  return floats, flags


@functools.partial(jax.jit, static_argnums=2)
def _run(floats, flags, implementation):
  """Gradients, outputs and state."""

  def loss(floats):
    y, state = delta_rule(**floats, **flags, implementation=implementation)
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    total = jnp.sum(y.astype(jnp.float32) * weights)
    return total + jnp.sum(jnp.sin(state)), (y, state)

  return jax.grad(loss, has_aux=True)(floats)


def _interpreted(*inputs):
  """On a simulated TPU, whose memory holds nan until it is written."""
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ):
    return jax.block_until_ready(_run(*inputs, "mosaic_tpu"))


def test_everything_at_once():
  """Two chunks and a bit, of two rows; masked tokens hold nan."""
  floats, flags = _inputs(261, 32, 96, b=2)
  exists = flags["mask"].reshape(2, 261, 1, 1)
  poisoned = floats | {
    name: jnp.where(exists, floats[name], jnp.nan) for name in "qkv"
  }
  assert_close(_interpreted(poisoned, flags), _run(floats, flags, "reference"))


@pytest.fixture
def simulated_gpu(monkeypatch):
  """Where the kernels for GPUs run without one; loads find nan by default."""
  for name, function in (("triton", "fwd"), ("triton_vjp", "bwd")):
    module = importlib.import_module(f"{KERNELS}.{name}")
    run = functools.partial(getattr(module, function), interpret=True)
    monkeypatch.setattr(module, function, run)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("plain", [False, True])
def test_the_gpu_kernels_equal_the_definition(plain):
  floats, flags = _inputs(70 if plain else 150, 96, 64, b=2)
  if plain:
    floats, flags = {name: floats[name] for name in ("q", "k", "v", "beta")}, {}
  expected = _run(floats, flags, "reference")
  assert_close(_run(floats, flags, "triton"), expected)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
  ("implementation", "simulated"),
  [("mosaic_tpu", pltpu.force_tpu_interpret_mode), ("triton", nullcontext)],
)
def test_numerical_gradients(implementation, simulated):
  floats, flags = _inputs(40, 32, 32)
  # Where both sides exist: no token forgets everything, none is at a bound.
  floats["log_decay"] = jnp.clip(floats["log_decay"], -1.0, -0.1)

  @jax.jit
  def run(floats):
    return delta_rule(**floats, **flags, implementation=implementation)

  with simulated():
    check_grads(run, (floats,), 1, ["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_equal_keys(strength):
  """Neither decay nor documents; errors of a strength of 2 are not forgotten.

  The tolerance is what one rounding of every strength does to the definition.
  """
  floats, _ = _inputs(100, 64, 64)
  floats = {name: floats[name] for name in ("q", "k", "v", "beta")}
  floats["k"] = jnp.broadcast_to(floats["k"][:, :1], floats["k"].shape)
  floats["beta"] = jnp.full_like(floats["beta"], strength)
  near = floats | {"beta": floats["beta"] - 2.0**-21}
  expected = _run(floats, {}, "reference")
  trees = _interpreted(floats, {}), expected, _run(near, {}, "reference")
  for x, leaf, rounded in zip(*map(jax.tree.leaves, trees), strict=True):
    tolerance = max(2e-5, 2 * relative_error(rounded, leaf))
    assert relative_error(x, leaf) <= tolerance < 1e-3


@pytest.fixture
def float32_products(monkeypatch):
  # XLA has no product of bfloat16 for a CPU: here it is one of float32, which
  # is exact for what bfloat16 can hold.
  def float32(dot, a, b, *args, **options):
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), *args, **options)

  gpu = "triton", "triton_vjp"
  for name in ("inverse", "mosaic_tpu", "mosaic_tpu_vjp", *gpu):
    kernel = importlib.import_module(f"{KERNELS}.{name}")
    monkeypatch.setattr(kernel, "dot", functools.partial(float32, kernel.dot))


def _run_on_gpu(*inputs):
  return _run(*inputs, "triton")


@pytest.mark.usefixtures("simulated_gpu", "float32_products")
@pytest.mark.parametrize("run", [_interpreted, _run_on_gpu])
def test_bfloat16(run):
  floats, flags = _inputs(150, 64, 32, jnp.bfloat16)
  grads, (y, state) = run(floats, flags)
  assert {name: x.dtype for name, x in grads.items()} == {
    name: x.dtype for name, x in floats.items()
  }
  assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  exact = {name: x.astype(jnp.float32) for name, x in floats.items()}
  expected = _run(exact, flags, "reference")
  assert_close((grads, (y, state)), expected, 1e-2)


@pytest.mark.parametrize(
  ("implementation", "platform", "tokens", "kernels"),
  [
    (None, "tpu", 9, ("fwd", "states", "bwd")),
    (None, "tpu", 1, ()),
    ("xla", "tpu", 9, ()),
    ("triton", "cuda", 9, TRITON),
    (None, "cuda", 9, ()),
    (None, "cpu", 9, ()),
  ],
)
def test_the_platform_decides_when_nobody_does(
  implementation, platform, tokens, kernels
):
  traced = _run.trace(*_inputs(tokens, 64, 64), implementation)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  for name in kernels:
    count = 2 if name in ("solve", "chain") else 1  # the gradient runs again
    assert text.count(f'name = "memcache_delta_rule_{name}"') == count
  assert kernels or "memcache_delta_rule" not in text


@pytest.mark.parametrize(
  ("sizes", "dtype", "reason"),
  [
    ((9, 64, 512), jnp.float32, "value width .* got 512"),
    ((9, 64, 64), jnp.float16, "got float16"),
  ],
)
def test_the_kernel_says_what_it_cannot(sizes, dtype, reason):
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(
      lambda inputs: _run(*inputs, "mosaic_tpu"), _inputs(*sizes, dtype)
    )


def test_second_derivatives():
  floats, _ = _inputs(9, 64, 64)
  arrays = [floats[name] for name in ("q", "k", "v", "beta")]

  def second(implementation):
    run = functools.partial(delta_rule, implementation=implementation)
    loss = lambda q: jnp.sum(jnp.sin(run(q, *arrays[1:])[0]))
    gradient = lambda q: jnp.sum(jax.grad(loss)(q) ** 2)
    return jax.eval_shape(jax.grad(gradient), arrays[0])

  assert second("xla").shape == arrays[0].shape
  with pytest.raises(NotImplementedError, match="first derivatives only"):
    second(None)


@pytest.mark.parametrize(("kind", "kernels"), [(GatedDelta, 1), (RWKV7, 0)])
def test_memories_ask_for_it(kind, kernels):
  memory, shape = kind(implementation="mosaic_tpu"), HeadShape(2, 32, 32)
  params = memory.init_params(jax.random.key(0), shape)
  tokens = random_tokens(memory, shape, 1, 9)
  traced = jax.jit(memory.scan).trace(params, None, tokens)
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert text.count('kernel_name = "memcache_delta_rule_fwd"') == kernels
