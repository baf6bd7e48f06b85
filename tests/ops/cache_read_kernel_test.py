"""The gated read as kernels for TPUs and GPUs, against its definition."""

import functools
import importlib
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from memcache_jax.ops import cache_read
from memcache_jax.testing import assert_close

# Kernels are simulated.
pytestmark = pytest.mark.slow

KERNELS = "memcache_jax.pallas_kernels.cache_read"
OUTER = "memcache_jax.pallas_kernels.linear_attention"


def _inputs(t, s, k, v, dtype=jnp.float32, b=1):
  rng = np.random.default_rng(t)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  q = normal(b, t, 2, k).astype(dtype)
  return q, normal(b, s, 2, k, v) / k**0.5, normal(b, t, 2, s)


def _run(inputs, implementation):
  def loss(*inputs):
    y = cache_read(*inputs, implementation=implementation)
    return jnp.sum(jnp.sin(y)), y

  run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  return run(*inputs)


def _interpreted(inputs):
  """On a simulated TPU, whose memory holds nan until it is written."""
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ):
    return jax.block_until_ready(_run(inputs, "mosaic_tpu"))


@pytest.mark.parametrize("sizes", [(130, 6, 64, 96), (128, 4, 256, 128)])
def test_equals_the_definition(sizes):
  inputs = _inputs(*sizes)
  assert_close(_interpreted(inputs), _run(inputs, "reference"))


def _run_on_gpu(inputs):
  return _run(inputs, "triton")


@pytest.fixture
def simulated_gpu(monkeypatch):
  """Where the kernels for GPUs run without one; loads find nan by default."""
  for name, function in (("triton", "fwd"), ("triton_vjp", "bwd")):
    module = importlib.import_module(f"{KERNELS}.{name}")
    run = functools.partial(getattr(module, function), interpret=True)
    monkeypatch.setattr(module, function, run)


@pytest.mark.usefixtures("simulated_gpu")
def test_the_gpu_kernels_equal_the_definition():
  inputs = _inputs(70, 5, 96, 64, b=2)
  assert_close(_run_on_gpu(inputs), _run(inputs, "reference"))


def test_several_blocks(monkeypatch):
  """States that are fetched again for every block of tokens."""
  config = importlib.import_module(f"{KERNELS}.config")
  chosen = config.config(config.Call(128, 128, "bfloat16", 4096, 64))
  assert (chosen.rows, chosen.states) == (1024, 64)
  assert config.config(config.Call(256, 256, "bfloat16", 9, 64)).states == 32
  monkeypatch.setattr(config, "config", lambda _: config.Config(128, 8))
  inputs = _inputs(300, 11, 96, 64, b=2)
  assert_close(_interpreted(inputs), _run(inputs, "reference"))


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("implementation", ["mosaic_tpu", "triton"])
def test_bfloat16(monkeypatch, implementation):
  # XLA has no product of bfloat16 for a CPU: here it is one of float32, which
  # is exact for what bfloat16 can hold.
  def float32(dot, a, b, *args, **options):
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), *args, **options)

  outer = importlib.import_module(f"{OUTER}.triton")
  modules = [outer] if implementation == "triton" else []
  for name in (implementation, f"{implementation}_vjp"):
    modules.append(importlib.import_module(f"{KERNELS}.{name}"))
  for module in modules:
    monkeypatch.setattr(module, "dot", functools.partial(float32, module.dot))
  inputs = _inputs(64, 5, 64, 64, jnp.bfloat16)
  run = _interpreted if implementation == "mosaic_tpu" else _run_on_gpu
  grads, y = run(inputs)
  assert [x.dtype.name for x in grads] == ["bfloat16", "float32", "float32"]
  assert y.dtype == jnp.float32
  assert_close((grads, y), _run(inputs, "reference"), 1e-2)


@pytest.mark.parametrize(
  ("implementation", "platform", "tokens", "kernels"),
  [
    (None, "tpu", 9, ("fwd", "bwd_tokens", "bwd_states")),
    (None, "tpu", 1, ()),
    ("xla", "tpu", 9, ()),
    ("triton", "cuda", 9, ("read", "read_vjp", "states_vjp")),
    (None, "cuda", 9, ()),
    (None, "cpu", 9, ()),
  ],
)
def test_the_platform_decides_when_nobody_does(
  implementation, platform, tokens, kernels
):
  def loss(*inputs):
    return jnp.sum(cache_read(*inputs, implementation=implementation) ** 2)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  traced = gradient.trace(*_inputs(tokens, 3, 64, 64))
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  for name in kernels:
    assert text.count(f'name = "memcache_cache_read_{name}"') == 1
  assert kernels or "memcache_cache_read" not in text


@pytest.mark.parametrize(
  ("sizes", "dtype", "reason"),
  [
    ((9, 3, 64, 1024), jnp.float32, "value width .* got 1024"),
    ((9, 3, 64, 64), jnp.float16, "got float16"),
    ((9, 0, 64, 64), jnp.float32, "at least one"),
  ],
)
def test_the_kernel_says_what_it_cannot(sizes, dtype, reason):
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(
      functools.partial(cache_read, implementation="mosaic_tpu"),
      *_inputs(*sizes, dtype),
    )


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
  ("implementation", "simulated"),
  [("mosaic_tpu", pltpu.force_tpu_interpret_mode), ("triton", nullcontext)],
)
def test_numerical_gradients(implementation, simulated):
  read = jax.jit(functools.partial(cache_read, implementation=implementation))
  with simulated():
    check_grads(read, _inputs(9, 3, 32, 32), 1, ["rev"], atol=2e-2, rtol=2e-2)


def test_second_derivatives():
  inputs = _inputs(9, 3, 64, 64)

  def second(implementation):
    read = functools.partial(cache_read, implementation=implementation)
    loss = lambda q: jnp.sum(jnp.sin(read(q, *inputs[1:])))
    gradient = lambda q: jnp.sum(jax.grad(loss)(q) ** 2)
    return jax.eval_shape(jax.grad(gradient), inputs[0])

  assert second("xla").shape == inputs[0].shape
  with pytest.raises(NotImplementedError, match="first derivatives only"):
    second(None)


def test_forward_mode():
  q, *others = _inputs(9, 3, 64, 64)

  def forwards(implementation):
    read = lambda q: cache_read(q, *others, implementation=implementation)
    return jax.jit(lambda q: jax.jvp(read, (q,), (q,))).lower(q)

  forwards("xla")
  with pytest.raises(TypeError, match="forward-mode"):
    forwards(None)
