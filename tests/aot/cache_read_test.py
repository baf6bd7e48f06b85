"""Gated reads compile for every TPU: tiles, fast memory, supported ops."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memcache_jax.ops import cache_read
from memcache_jax.ops.mlp_memory import MLP, GatedMLP, read_networks

KERNELS = "memcache_jax.pallas_kernels.cache_read"
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

# Tokens, states, widths, dtype.
CASES = {
  "streamed_256": (2000, 100, 256, 256, jnp.bfloat16),
  "odd_96": (300, 11, 96, 64, jnp.float32),
  "wide_128": (1024, 16, 128, 512, jnp.bfloat16),
}


# Also how many states each token selects.
SELECTED = {
  "long_256": (9000, 64, 2, 256, 256, jnp.bfloat16),
  "odd_96": (300, 11, 3, 96, 64, jnp.float32),
}
# Architecture, tokens, networks, width, dtype.
NETWORKS = {
  "mlp_128": (MLP(), 4096, 16, 128, jnp.bfloat16),
  "gated_96": (GatedMLP(residual=True, norm=True), 300, 3, 96, jnp.float32),
}


def _array(chip):
  device = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGIES[chip]
  ).devices[0]

  def array(*shape, dtype=jnp.float32):
    sharding = SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return array


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("name", CASES)
def test_reads_of_all_compile(name, chip):
  t, s, k, v, dtype = CASES[name]
  array = _array(chip)
  arrays = array(1, t, 2, k, dtype=dtype), array(1, s, 2, k, v)

  def loss(*inputs):
    return jnp.sum(cache_read(*inputs, implementation="mosaic_tpu") ** 2)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  compiled = gradient.lower(*arrays, array(1, t, 2, s)).compile()
  for kernel in ("fwd", "bwd_tokens", "bwd_states"):
    assert f"memcache_cache_read_{kernel}" in compiled.as_text()


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("name", SELECTED)
def test_reads_of_selected_states_compile(name, chip):
  t, s, r, k, v, dtype = SELECTED[name]
  array = _array(chip)
  # The kernels alone: sorting takes most of the time to compile.
  module = lambda name: importlib.import_module(f"{KERNELS}.{name}")
  pieces = module("config")
  call = pieces.SelectedCall(k, v, jnp.dtype(dtype).name, t, s, r, heads=2)
  assert pieces.selected_supports(call) is None
  config = pieces.selected_config(call)
  count = pieces.tiles(call, config)
  blocks, t = -(-t // config.tokens), config.tokens
  integers = lambda *shape: array(blocks, 2, *shape, dtype=jnp.int32)
  tiles = module("selected").Tiles(
    state=integers(count),
    rows=integers(count),
    token=integers(count, config.tile),
    place=integers(t // config.tokens_per_row, 128),
    weights=array(blocks, 2, count, 128),
  )
  q, d_y = (array(blocks, 2, t, x, dtype=dtype) for x in (k, v))
  inputs = q, array(1, s, 2, k, v), tiles

  def both(*inputs, d_y):
    y = module("selected").fwd(*inputs, config=config)
    return y, module("selected_vjp").bwd(*inputs, d_y, config=config)

  text = jax.jit(both).lower(*inputs, d_y=d_y).compile().as_text()
  for kernel in ("fwd", "bwd"):
    assert f"memcache_cache_read_selected_{kernel}" in text


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_reads_of_networks_compile(name, chip):
  architecture, t, s, width, dtype = NETWORKS[name]
  array = _array(chip)
  params = jax.eval_shape(
    lambda: architecture.init_params(jax.random.key(0), 2, width, width)
  )
  params = {name: array(*x.shape) for name, x in params.items()}
  memories = {
    name: array(1, s, *params[name].shape)
    for name in architecture.affine_maps(width, width)
  }

  def read(*inputs):
    return read_networks(architecture, *inputs, implementation="mosaic_tpu")

  arrays = array(1, t, 2, width, dtype=dtype), array(1, t, 2, s)
  text = jax.jit(read).lower(params, memories, *arrays).compile().as_text()
  assert "memcache_mlp_memory_read" in text
