"""Gated reads of networks as kernels, against one network at a time."""

import functools
import importlib
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from memcache_jax.caching._aggregators import Selection
from memcache_jax.caching._sparse_read import read_selected
from memcache_jax.memories import Miras
from memcache_jax.ops.mlp_memory import MLP, GatedMLP, read_networks
from memcache_jax.testing import assert_close

# Kernels are simulated.
pytestmark = pytest.mark.slow

KERNELS = "memcache_jax.pallas_kernels.mlp_memory"

CASES = {
  "mlp": (MLP(bias=True), 130, 3, 64),
  "gated": (GatedMLP(residual=True), 9, 2, 96),
  "deep": (MLP(depth=3, hidden_factor=2, activation="silu"), 20, 2, 128),
}


def _inputs(architecture, tokens, networks, width, dtype=jnp.float32):
  rng = np.random.default_rng(tokens)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  params = architecture.init_params(jax.random.key(0), 2, width, width)
  names = architecture.affine_maps(width, width)
  names = {*names, *("b" + name[1:] for name in names)} & params.keys()
  memories = {
    name: normal(1, networks, *params[name].shape) / width**0.5
    for name in sorted(names)
  }
  q = normal(1, tokens, 2, width).astype(dtype)
  return params, memories, q, normal(1, tokens, 2, networks)


def _run(architecture, inputs, implementation):
  def loss(*inputs):
    y = read_networks(architecture, *inputs, implementation=implementation)
    return jnp.sum(jnp.sin(y)), y

  run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
  return jax.block_until_ready(run(*inputs))


def _simulated():
  """A simulated TPU, whose memory holds nan until it is written."""
  return pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  )


@pytest.mark.parametrize("name", CASES)
def test_equals_one_network_at_a_time(name, monkeypatch):
  pieces = importlib.import_module(f"{KERNELS}.config")
  # The gradients of "mlp" in two parts.
  config = pieces.GradientConfig(tokens=128, chunk=128)
  monkeypatch.setattr(pieces, "gradient_config", lambda _: config)
  architecture, *sizes = CASES[name]
  inputs = _inputs(architecture, *sizes)
  expected = _run(architecture, inputs, "xla")
  with _simulated():
    got = _run(architecture, inputs, "mosaic_tpu")
  assert_close(got, expected)


@pytest.fixture
def simulated_gpu(monkeypatch):
  """Where the kernels for GPUs run without one; loads find nan by default."""
  selected = (("triton_selected", name) for name in ("fwd", "bwd"))
  for name, function in (("triton", "fwd"), ("triton_vjp", "bwd"), *selected):
    module = importlib.import_module(f"{KERNELS}.{name}")
    run = functools.partial(getattr(module, function), interpret=True)
    monkeypatch.setattr(module, function, run)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
  ("architecture", "sizes"),
  [
    (MLP(bias=True), (70, 3, 64)),
    (GatedMLP(residual=True), (9, 2, 96)),
    (MLP.ttt_linear(), (20, 2, 128)),
  ],
)
def test_the_gpu_kernels_equal_one_network_at_a_time(
  architecture, sizes, monkeypatch
):
  # Gradients of three are not taken together, of two they are.
  pieces = importlib.import_module(f"{KERNELS}.config")
  monkeypatch.setattr(pieces, "_TOGETHER", 2)
  inputs = _inputs(architecture, *sizes)
  expected = _run(architecture, inputs, "xla")
  assert_close(_run(architecture, inputs, "triton"), expected)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize(
  ("implementation", "simulated"),
  [("mosaic_tpu", pltpu.force_tpu_interpret_mode), ("triton", nullcontext)],
)
def test_numerical_gradients(implementation, simulated, selected):
  architecture = MLP(hidden_factor=2)
  *arrays, weights = _inputs(architecture, 9, 3, 32)

  @jax.jit
  def read(params, memories, q, weights):
    if not selected:
      return read_networks(
        *(architecture, params, memories, q, weights),
        implementation=implementation,
      )
    memory = Miras(architecture, implementation=implementation)
    index = jnp.zeros(weights.shape, jnp.int32).at[:, ::2].set(2)[..., :1]
    selection = Selection(index, weights[..., :1], weights[..., 2])
    return read_selected(memory, params, memories, q, selection)

  with simulated():
    check_grads(*(read, (*arrays, weights), 1, ["rev"]), atol=2e-2, rtol=2e-2)


def test_tokens_whose_gradients_are_taken_together():
  pieces = importlib.import_module(f"{KERNELS}.config")
  maps = ((128, 512), (512, 128))
  call = lambda tokens: pieces.Call(maps, 128, 128, "bfloat16", tokens, 64)
  assert pieces.gradient_config(call(4096)).tokens == 4096
  assert pieces.gradient_config(call(32768)).tokens == 16384


@functools.cache
def _selected(architecture, tokens, implementation):
  """Reads of two of five networks, or of none, and their gradients."""
  params, memories, q, weights = _inputs(architecture, tokens, 5, 64)
  rng = np.random.default_rng(0)
  index = rng.random(weights.shape).argsort(-1)[..., :2]
  index[rng.random(index.shape) < 0.2] = -1
  index = jnp.asarray(index, jnp.int32)
  # Nobody selects the last one, which must not matter.
  fill = {"constant_values": 0.0 if implementation is None else jnp.nan}
  memories = jax.tree.map(lambda x: jnp.pad(x, _one_more(x), **fill), memories)

  def read(params, memories, q, weights):
    if implementation is None:  # all of them, with zeros for the others
      hot = index[..., None] == jnp.arange(6).reshape(1, 1, 1, 1, -1)
      weights = jnp.sum(jnp.where(hot, weights[..., :2, None], 0.0), axis=3)
      return read_networks(
        architecture, params, memories, q, weights, implementation="xla"
      )
    memory = Miras(architecture, implementation=implementation)
    selection = Selection(index, weights[..., :2], weights[..., 2])
    return read_selected(memory, params, memories, q, selection)

  loss = lambda *inputs: (jnp.sum(jnp.sin(y := read(*inputs))), y)
  run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
  return jax.block_until_ready(run(params, memories, q, weights))


def test_reads_of_selected_networks():
  with _simulated():
    got = _selected(MLP(bias=True), 70, "mosaic_tpu")
  assert_close(got, _selected(MLP(bias=True), 70, None))


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
  ("architecture", "tokens"), [(MLP(bias=True), 70), (MLP.ttt_linear(), 9)]
)
def test_reads_of_selected_networks_on_a_gpu(architecture, tokens):
  got = _selected(architecture, tokens, "triton")
  assert_close(got, _selected(architecture, tokens, None))


def _one_more(x):
  return [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)]


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize(
  ("implementation", "modules"),
  [("mosaic_tpu", ["network"]), ("triton", ["triton", "triton_vjp"])],
)
def test_operands_of_bfloat16(implementation, modules, monkeypatch):
  # XLA has no product of bfloat16 for a CPU: here it is one of float32, which
  # is exact for what bfloat16 can hold.
  def float32(dot, a, b, *args):
    return dot(a.astype(jnp.float32), b.astype(jnp.float32), *args)

  for name in modules:
    kernel = importlib.import_module(f"{KERNELS}.{name}")
    monkeypatch.setattr(kernel, "dot", functools.partial(float32, kernel.dot))
  architecture = MLP()
  exact = _inputs(architecture, 20, 2, 64)
  inputs = _inputs(architecture, 20, 2, 64, jnp.bfloat16)
  simulated = _simulated() if implementation == "mosaic_tpu" else nullcontext()
  with simulated:
    grads, y = _run(architecture, inputs, implementation)
  assert grads[2].dtype == jnp.bfloat16
  assert y.dtype == jnp.float32
  exact_grads, exact_y = _run(architecture, exact, "xla")
  assert_close(y, exact_y, 1e-2)
  assert_close(grads, exact_grads, 2e-2)


@pytest.mark.parametrize(
  ("implementation", "platform", "width", "kernels"),
  [
    (None, "tpu", 64, ("mlp_memory_read", "mlp_memory_read_bwd")),
    (None, "tpu", 24, ()),
    ("xla", "tpu", 64, ()),
    (
      *("triton", "cuda", 64),
      tuple(f"read_networks_{x}" for x in ("read", "read_vjp", "networks_vjp")),
    ),
    (None, "cuda", 64, ()),
    (None, "cpu", 64, ()),
  ],
)
def test_the_platform_decides_when_nobody_does(
  implementation, platform, width, kernels
):
  architecture = MLP()

  def loss(*inputs):
    y = read_networks(architecture, *inputs, implementation=implementation)
    return jnp.sum(y**2)

  inputs = _inputs(architecture, 9, 2, width, jnp.bfloat16)
  traced = jax.jit(jax.grad(loss, argnums=2)).trace(*inputs)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  for name in kernels:
    assert text.count(f'name = "memcache_{name}"') == 1
  assert kernels or 'name = "memcache_' not in text


def _shapes(architecture, width, tokens, networks):
  params = jax.eval_shape(
    lambda: architecture.init_params(jax.random.key(0), 2, width, width)
  )
  array = jax.ShapeDtypeStruct
  memories = {
    name: array((1, networks, *params[name].shape), jnp.float32)
    for name in architecture.affine_maps(width, width)
  }
  q = array((1, tokens, 2, width), jnp.bfloat16)
  weights = array((1, tokens, 2, networks), jnp.float32)
  return params, memories, q, weights


@pytest.mark.parametrize(
  ("implementation", "architecture", "width", "reason"),
  [
    ("mosaic_tpu", MLP(depth=3), 512, "a network must fit into fast memory"),
    ("triton", MLP(), 96, "the width of a norm is a power of 2: got 96"),
    ("triton", MLP(depth=3), 64, "one hidden layer at most: got 3 maps"),
  ],
)
def test_the_kernel_says_what_it_cannot(
  implementation, architecture, width, reason
):
  run = functools.partial(
    read_networks, architecture, implementation=implementation
  )
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(run, *_shapes(architecture, width, 9, 3))


def test_a_tpu_takes_as_many_networks_as_there_are():
  """Gates of one at a time are in fast memory."""
  shapes = _shapes(MLP(), 128, 1024, 20_000)
  run = functools.partial(read_networks, MLP(), implementation="mosaic_tpu")
  traced = jax.jit(run).trace(*shapes)
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert 'name = "memcache_mlp_memory_read"' in text
