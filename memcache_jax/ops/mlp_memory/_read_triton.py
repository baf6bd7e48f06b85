"""Between reads of stored networks and their kernels for GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Float, Int, Params
from memcache_jax.ops import _dispatch
from memcache_jax.ops.cache_read import _selected_triton
from memcache_jax.ops.mlp_memory import _read_kernels
from memcache_jax.ops.mlp_memory._architecture import Architecture
from memcache_jax.ops.mlp_memory._read_kernels import Sizes


def why_not(sizes: Sizes) -> str | None:
  """Why the kernels cannot take a call; None if they can."""
  architecture = sizes.architecture
  if (reason := _read_kernels.why_not_network(architecture)) is not None:
    return reason
  if (reason := why_deep(architecture)) is not None:
    return reason
  module = _dispatch.kernel_module("mlp_memory.config")
  return module.triton_supports(
    _read_kernels.call_of(module, sizes), norm=architecture.has_norm
  )


def why_deep(architecture: Architecture) -> str | None:
  """Why kernels for GPUs cannot go through a network; None if they can."""
  depth = getattr(architecture, "depth", 2)
  if depth > 2:
    return f"its networks have one hidden layer at most: got {depth} maps"
  return None


def network_of(architecture: Architecture, key_dim: int, value_dim: int) -> Any:
  """The kernels' `Network`."""
  maps = architecture.affine_maps(key_dim, value_dim)
  *first, last = maps
  between = maps[last].in_dim if first else 0
  return _dispatch.kernel_module("mlp_memory.triton").Network(
    architecture.forward, tuple(first), last, (key_dim, between, value_dim)
  )


def triton(
  sizes: Sizes,
  q: Float[Array, "b t n k"],
  memories: Params,
  weights: Float[Array, "b t n s"],
  static: Params,
) -> Float[Array, "b t n v"]:
  """`read_networks`, as a kernel for GPUs."""
  pieces = _dispatch.kernel_module("mlp_memory.config")
  module = _dispatch.kernel_module("mlp_memory.triton")
  return module.fwd(
    _network(sizes),
    *(q, _float32(memories), _with_slot(static), weights),
    config=pieces.triton_config(_read_kernels.call_of(pieces, sizes)),
  )


def triton_vjp(
  sizes: Sizes,
  q: Float[Array, "b t n k"],
  memories: Params,
  weights: Float[Array, "b t n s"],
  static: Params,
  d_y: Float[Array, "b t n v"],
) -> tuple[Float[Array, "b t n k"], Params, Float[Array, "b t n s"], Params]:
  """Its gradients, of some networks after the other."""
  pieces = _dispatch.kernel_module("mlp_memory.config")
  network = _network(sizes)
  module = _dispatch.kernel_module("mlp_memory.triton_vjp")
  call = _read_kernels.call_of(pieces, sizes)
  config = pieces.triton_gradient_config(call)
  size = pieces.networks_together(call)
  d_y, static = d_y.astype(q.dtype), _with_slot(static)

  def some(sums, inputs):
    memories, weights = inputs
    d_q, d_memories, d_static, d_weights = module.bwd(
      network, q, memories, static, weights, d_y, config=config
    )
    sums = jax.tree.map(jnp.add, sums, (d_q, d_static))
    return sums, (d_memories, d_weights)

  inputs = (
    {
      name: rearrange(x, "b (g s) n ... -> g b s n ...", s=size)
      for name, x in _float32(memories).items()
    },
    rearrange(weights, "b t n (g s) -> g b t n s", s=size),
  )
  zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), (q, static))
  (d_q, d_static), (d_memories, d_weights) = jax.lax.scan(some, zeros, inputs)
  d_weights = rearrange(d_weights, "g b t n s -> b t n (g s)")
  return (
    d_q.astype(q.dtype),
    {
      name: rearrange(x, "g b s n ... -> b (g s) n ...").astype(
        memories[name].dtype
      )
      for name, x in d_memories.items()
    },
    d_weights.astype(weights.dtype),
    {name: x[:, 0] for name, x in d_static.items()},
  )


def triton_selected(
  sizes: Sizes,
  q: Float[Array, "b t n k"],
  memories: Params,
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  static: Params,
) -> Float[Array, "b t n v"]:
  """`read_selected_networks`, as a kernel for GPUs."""
  pieces = _dispatch.kernel_module("mlp_memory.config")
  module = _dispatch.kernel_module("mlp_memory.triton_selected")
  call = _read_kernels.call_of(pieces, sizes)
  config = pieces.for_selected(
    *(pieces.triton_config(call), call, index.shape[3])
  )
  reads = module.fwd(
    *(_network(sizes), q, _float32(memories), _with_slot(static)),
    _selected_triton.pairs(weights),
    _selected_triton.tiles(index, sizes.networks, config.rows),
    config=config,
  )
  return _selected_triton.sums(reads, index)


def triton_selected_vjp(
  sizes: Sizes,
  q: Float[Array, "b t n k"],
  memories: Params,
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  static: Params,
  d_y: Float[Array, "b t n v"],
) -> tuple[Float[Array, "b t n k"], Params, Float[Array, "b t n r"], Params]:
  """Its gradients."""
  pieces = _dispatch.kernel_module("mlp_memory.config")
  module = _dispatch.kernel_module("mlp_memory.triton_selected")
  call = _read_kernels.call_of(pieces, sizes)
  config = pieces.for_selected(
    *(pieces.triton_gradient_config(call), call, index.shape[3])
  )
  d_q, d_networks, d_static, d_weights = module.bwd(
    *(_network(sizes), q, _float32(memories), _with_slot(static)),
    _selected_triton.pairs(weights),
    _selected_triton.tiles(index, sizes.networks, config.rows),
    d_y.astype(q.dtype),
    config=config,
  )
  return (
    _selected_triton.sums(d_q, index).astype(q.dtype),
    {name: x.astype(memories[name].dtype) for name, x in d_networks.items()},
    _selected_triton.of_tokens(d_weights, index).astype(weights.dtype),
    {name: x[:, 0] for name, x in d_static.items()},
  )


def _network(sizes: Sizes) -> Any:
  return network_of(sizes.architecture, sizes.key_dim, sizes.value_dim)


def _float32(memories):
  return {name: x.astype(jnp.float32) for name, x in memories.items()}


def _with_slot(static):
  """As if they were those of one network [b 1 n v]."""
  return {name: x[:, None] for name, x in static.items()}
