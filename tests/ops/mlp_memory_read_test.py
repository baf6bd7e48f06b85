"""Gated reads of networks as a TPU kernel, against one network at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.ops.mlp_memory import MLP, GatedMLP, read_networks
from memcache_jax.testing import assert_close

# Kernels are simulated.
pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("name", CASES)
def test_equals_one_network_at_a_time(name):
  architecture, *sizes = CASES[name]
  inputs = _inputs(architecture, *sizes)
  expected = _run(architecture, inputs, "xla")
  # A simulated TPU, whose memory holds nan until it is written.
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ):
    got = _run(architecture, inputs, "mosaic_tpu")
  assert_close(got, expected)


@pytest.mark.parametrize(
  ("implementation", "platform", "width", "kernels"),
  [
    (None, "tpu", 64, 1),
    (None, "tpu", 24, 0),
    ("xla", "tpu", 64, 0),
    (None, "cpu", 64, 0),
  ],
)
def test_the_platform_decides_when_nobody_does(
  implementation, platform, width, kernels
):
  architecture = MLP()
  run = functools.partial(
    read_networks, architecture, implementation=implementation
  )
  inputs = _inputs(architecture, 9, 2, width, jnp.bfloat16)
  lowered = jax.jit(run).trace(*inputs).lower(lowering_platforms=(platform,))
  kernel = 'kernel_name = "memcache_mlp_memory_read"'
  assert lowered.as_text().count(kernel) == kernels


@pytest.mark.parametrize(
  ("architecture", "width", "reason"),
  [
    (MLP(), 40, "multiples of 32: got 40"),
    (MLP(depth=3), 512, "a network must fit into fast memory"),
  ],
)
def test_the_kernel_says_what_it_cannot(architecture, width, reason):
  params = jax.eval_shape(
    lambda: architecture.init_params(jax.random.key(0), 2, width, width)
  )
  array = jax.ShapeDtypeStruct
  memories = {
    name: array((1, 3, *params[name].shape), jnp.float32)
    for name in architecture.affine_maps(width, width)
  }
  q, weights = (
    array((1, 9, 2, width), jnp.bfloat16),
    array((1, 9, 2, 3), jnp.float32),
  )
  run = functools.partial(
    read_networks, architecture, implementation="mosaic_tpu"
  )
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(run, params, memories, q, weights)
