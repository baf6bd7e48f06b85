"""Gated reads compile for every TPU: tiles, fast memory, supported ops."""

import functools
import importlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memcache_jax.ops import cache_read
from memcache_jax.ops.mlp_memory import MLP, GatedMLP, read_networks

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
# Chip, architecture, tokens, networks, width, dtype.
NETWORKS = {
  "mlp_128": ("v5e", MLP(), 4096, 16, 128, jnp.bfloat16),
  "gated_96": (
    *("v5p", GatedMLP(residual=True, norm=True)),
    *(300, 3, 96, jnp.float32),
  ),
  "bias_64": ("v6e", MLP(bias=True), 300, 40, 64, jnp.bfloat16),
  "gated_64": ("v5e", GatedMLP(norm=True), 300, 3, 64, jnp.float32),
  "bias_256": ("v5p", MLP(bias=True), 300, 40, 256, jnp.bfloat16),
  "mlp_96": ("v6e", MLP(), 4096, 16, 96, jnp.bfloat16),
}


@functools.cache
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
  states = _array(chip)(1, s, 2, k, v)
  reader = _module("cache_read.selected").matrices(k, v, jnp.dtype(dtype))
  text = _selected(reader, chip, (t, s, r, k, v, dtype), states, {})
  for kernel in ("fwd", "bwd"):
    assert f"memcache_cache_read_selected_{kernel}" in text


def _module(name):
  return importlib.import_module(f"memcache_jax.pallas_kernels.{name}")


def _selected(reader, chip, sizes, stored, shared, maps=()):
  """The kernels alone: sorting takes most of the time to compile."""
  t, s, r, k, v, dtype = sizes
  pieces, module = _module("cache_read.config"), _module("cache_read.selected")
  call = pieces.SelectedCall(
    *(k, v, jnp.dtype(dtype).name, t, s, r), heads=2, maps=maps
  )
  assert pieces.selected_supports(call) is None
  config = pieces.selected_config(call)
  count, array = pieces.tiles(call, config), _array(chip)
  blocks, t = -(-t // config.tokens), config.tokens
  integers = lambda *shape: array(blocks, 2, *shape, dtype=jnp.int32)
  tiles = module.Tiles(
    state=integers(count + config.ring),
    used=integers(),
    rows=integers(count),
    place=integers(*pieces.table_shape(config)),
    weights=array(blocks, 2, config.tile, pieces.lanes(count)),
  )
  q, d_y = (array(blocks, 2, t, x, dtype=dtype) for x in (k, v))
  encode = _module("cache_read.selected_rows").encode

  def both(q, d_y, *inputs):
    y = module.fwd(reader, encode(q), *inputs, config=config)
    backward = _module("cache_read.selected_vjp").bwd
    return y, backward(reader, encode(q, d_y), *inputs, config=config)

  lowered = jax.jit(both).lower(q, d_y, stored, shared, tiles)
  return lowered.compile().as_text()


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize("name", NETWORKS)
def test_reads_of_networks_compile(name):
  chip, architecture, t, s, width, dtype = NETWORKS[name]
  array, maps = _array(chip), architecture.affine_maps(width, width)
  params = jax.eval_shape(
    lambda: architecture.init_params(jax.random.key(0), 2, width, width)
  )
  params = {name: array(*x.shape) for name, x in params.items()}
  memories = {
    name: array(1, s, *x.shape)
    for name, x in params.items()
    if not name.startswith("ln")
  }

  def loss(*inputs):
    y = read_networks(architecture, *inputs, implementation="mosaic_tpu")
    return jnp.sum(y**2)

  arrays = array(1, t, 2, width, dtype=dtype), array(1, t, 2, s)
  gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)))
  text = gradient.lower(params, memories, *arrays).compile().as_text()
  for kernel in ("read", "read_bwd"):
    assert re.search(rf"memcache_mlp_memory_{kernel}\b", text)

  reader = _module("mlp_memory.selected").networks(
    architecture.forward, width, width, jnp.dtype(dtype)
  )
  rows = lambda x: array(*x.shape[:-1], 1, x.shape[-1])
  text = _selected(
    *(reader, chip, (t, s, 2, width, width, dtype)),
    {name: x if x.ndim == 5 else rows(x) for name, x in memories.items()},
    {name: array(1, 2, 1, width) for name in params if name not in memories},
    tuple((x.in_dim, x.out_dim) for x in maps.values()),
  )
  for kernel in ("fwd", "bwd"):
    assert f"memcache_mlp_memory_selected_{kernel}" in text


@pytest.mark.aot("libtpu")
def test_gradients_of_networks_on_a_mesh():
  """Rows and heads over four chips: all that is exchanged is shared."""
  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGIES["v5e"]
  )
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  devices = np.reshape(topology.devices, (2, 2))
  mesh = jax.sharding.Mesh(devices, ("data", "heads"), axis_types=kinds)
  spread = jax.NamedSharding(mesh, jax.P("data", None, "heads"))
  of_heads = jax.NamedSharding(mesh, jax.P("heads"))
  architecture, t, s, width = MLP(), 128, 2, 128
  params = jax.eval_shape(
    lambda: architecture.init_params(jax.random.key(0), 2, width, width)
  )
  params = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_heads)
    for name, x in params.items()
  }

  def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((2, *shape), dtype, sharding=spread)

  memories = {
    name: array(s, *x.shape)
    for name, x in params.items()
    if not name.startswith("ln")
  }
  q, weights = array(t, 2, width, dtype=jnp.bfloat16), array(t, 2, s)

  def loss(*inputs):
    y = read_networks(architecture, *inputs, implementation="mosaic_tpu")
    return jnp.sum(y**2)

  with jax.set_mesh(mesh):
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    compiled = gradient.lower(params, memories, q, weights).compile()
  text = compiled.as_text()
  assert re.search(r"memcache_mlp_memory_read_bwd\b", text)
  for exchange in ("all-gather", "all-to-all", "collective-permute"):
    assert exchange not in text
  shapes = re.findall(r"= (\(?f32\[.*) all-reduce(?:-start)?\(", text)
  assert shapes
  for shape in re.findall(r"f32\[([\d,]*)\]", " ".join(shapes)):
    sizes = [int(size) for size in shape.split(",") if size]
    assert math.prod(sizes) <= 2 * width, shape  # ln_gain and ln_bias
