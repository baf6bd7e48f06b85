"""Reading selected states as kernels, against reading all with zeros."""

import dataclasses
import functools
import importlib
from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from memcache_jax.caching import _sparse_read
from memcache_jax.caching._aggregators import Selection
from memcache_jax.memories import Linear
from memcache_jax.ops import cache_read
from memcache_jax.testing import assert_close

# Kernels are simulated.
pytestmark = pytest.mark.slow

KERNELS = "memcache_jax.pallas_kernels.cache_read"


def _inputs(t, s, r, k, v, b=1):
  rng = np.random.default_rng(t)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  index = rng.random((b, t, 2, s - 1)).argsort(-1)[..., :r]
  index[rng.random(index.shape) < 0.2] = -1  # and the last one never
  q, states = normal(b, t, 2, k), normal(b, s, 2, k, v) / k**0.5
  return q, states, normal(b, t, 2, r), jnp.asarray(index, jnp.int32)


@functools.cache
def _gradient(read):
  def loss(q, states, weights, index):
    y = read(q, states, index, weights)
    return jnp.sum(jnp.sin(y)), y

  return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def _run(read, inputs):
  return jax.block_until_ready(_gradient(read)(*inputs))


def _dense(q, states, index, weights):
  hot = index[..., None] == jnp.arange(states.shape[1]).reshape(1, 1, 1, 1, -1)
  weights = jnp.sum(jnp.where(hot, weights[..., None], 0.0), axis=3)
  return cache_read(q, states, weights, implementation="reference")


def _sparse(q, states, index, weights, implementation="mosaic_tpu"):
  memory = Linear(implementation=implementation)
  return _sparse_read.read_selected(
    memory, {}, states, q, Selection(index, weights, weights[..., 0])
  )


def _interpreted(inputs):
  """On a simulated TPU, whose memory holds nan until it is written.

  It prints where a copy is read, or written over, before it has come.
  """
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
  ):
    return _run(_sparse, inputs)


@pytest.mark.parametrize("sizes", [(70, 5, 3, 64, 96), (3, 9, 1, 32, 32)])
def test_equals_reading_all(sizes, capsys):
  inputs = _inputs(*sizes)
  assert_close(_interpreted(inputs), _run(_dense, inputs))
  assert "RACE" not in capsys.readouterr().out


_on_gpu = functools.partial(_sparse, implementation="triton")


@pytest.fixture
def simulated_gpu(monkeypatch):
  """Where the kernels for GPUs run without one; loads find nan by default."""
  module = importlib.import_module(f"{KERNELS}.triton_selected")
  for name in ("fwd", "bwd"):
    run = functools.partial(getattr(module, name), interpret=True)
    monkeypatch.setattr(module, name, run)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("sizes", [(70, 4, 2, 96, 64), (3, 9, 1, 32, 32)])
def test_the_gpu_kernels_equal_reading_all(sizes):
  """Of two rows; nobody selects the last state, which must not matter."""
  q, states, weights, index = _inputs(*sizes, b=2)
  poisoned = states.at[:, -1].set(jnp.nan)
  got = _run(_on_gpu, (q, poisoned, weights, index))
  assert_close(got, _run(_dense, (q, states, weights, index)))


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
  ("implementation", "simulated"),
  [("mosaic_tpu", pltpu.force_tpu_interpret_mode), ("triton", nullcontext)],
)
def test_numerical_gradients(implementation, simulated):
  *arrays, index = _inputs(9, 4, 2, 32, 32)

  @jax.jit
  def read(q, states, weights):
    return _sparse(q, states, index, weights, implementation)

  with simulated():
    check_grads(read, arrays, 1, ["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("simulated_gpu")
def test_bfloat16_on_a_gpu(monkeypatch):
  # As below.
  def float32(dot, a, b, *args):
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), *args)

  kernel = importlib.import_module(f"{KERNELS}.triton_selected")
  monkeypatch.setattr(kernel, "dot", functools.partial(float32, kernel.dot))
  q, *others = _inputs(40, 3, 1, 64, 256)
  inputs = (q.astype(jnp.bfloat16), *others)
  grads, y = _run(_on_gpu, inputs)
  assert [x.dtype.name for x in grads] == ["bfloat16", "float32", "float32"]
  assert y.dtype == jnp.float32
  assert_close((grads, y), _run(_dense, inputs), 1e-2)


def test_several_blocks_of_tokens(monkeypatch):
  config = importlib.import_module(f"{KERNELS}.config")
  chosen = config.selected_config(
    config.SelectedCall(128, 128, "bfloat16", 4096, 64, 2, heads=8)
  )
  assert chosen.tile == 160
  assert chosen.tokens == 4096
  pieces = config.SelectedConfig(
    tokens=64, selected=1, tile=16, tiles_per_step=2, ring=8
  )
  monkeypatch.setattr(config, "selected_config", lambda _: pieces)
  inputs = _inputs(67, 5, 1, 128, 64, b=2)
  assert_close(_interpreted(inputs), _run(_dense, inputs))


def test_nothing_else_is_touched():
  """Neither states that nobody selected, nor any, where nobody selects."""
  q, states, weights, index = _inputs(20, 4, 2, 32, 32)
  poisoned = states.at[:, -1].set(jnp.nan)
  got = _interpreted((q, poisoned, weights, index))
  assert_close(got, _run(_dense, (q, states, weights, index)))
  nothing = _interpreted((q, states, weights, jnp.full_like(index, -1)))
  chex.assert_trees_all_equal(nothing, jax.tree.map(jnp.zeros_like, nothing))


def test_bfloat16(monkeypatch):
  # XLA has no product of bfloat16 for a CPU: here it is one of float32, which
  # is exact for what bfloat16 can hold.
  def float32(dot, a, b, **options):
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), **options)

  kernel = importlib.import_module(f"{KERNELS}.selected")
  monkeypatch.setattr(kernel, "dot", functools.partial(float32, kernel.dot))
  # Two numbers share a word; of gradients one number is left over.
  q, *others = _inputs(20, 4, 1, 256, 128)
  inputs = (q.astype(jnp.bfloat16), *others)
  grads, y = _interpreted(inputs)
  assert [x.dtype.name for x in grads] == ["bfloat16", "float32", "float32"]
  assert y.dtype == jnp.float32
  assert_close((grads, y), _run(_dense, inputs), 1e-2)


@pytest.mark.parametrize(
  ("implementation", "platform", "tokens", "kernels"),
  [
    (None, "tpu", 9, ("cache_read_selected_fwd", "cache_read_selected_bwd")),
    (None, "tpu", 1, ()),
    ("xla", "tpu", 9, ()),
    (
      *("triton", "cuda", 9),
      tuple(f"selected_read_{x}" for x in ("read", "read_vjp", "states_vjp")),
    ),
    (None, "cuda", 9, ()),
    (None, "cpu", 9, ()),
  ],
)
def test_the_platform_decides_when_nobody_does(
  implementation, platform, tokens, kernels
):
  *arrays, index = _inputs(tokens, 5, 1, 32, 32)

  def loss(q, states, weights):
    return jnp.sum(_sparse(q, states, index, weights, implementation) ** 2)

  traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arrays)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  for name in kernels:
    assert text.count(f'name = "memcache_{name}"') == 1
  assert kernels or 'name = "memcache_' not in text


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"heads": 2**20}, "at most 65536 tiles"),
    ({"selected": 9}, "selects 1 to 8 states: got 9"),
  ],
)
def test_the_kernel_says_what_it_cannot(change, reason):
  config = importlib.import_module(f"{KERNELS}.config")
  call = config.SelectedCall(64, 64, "bfloat16", 512, 16, 2, heads=4)
  assert config.selected_supports(call) is None
  call = dataclasses.replace(call, **change)
  assert reason in config.selected_supports(call)
