"""Between reads of selected states and their kernels for GPUs."""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Float, Int
from memcache_jax.ops import _dispatch
from memcache_jax.ops.cache_read import _selected_kernels
from memcache_jax.ops.cache_read._plan import make_plan


def why_not(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
) -> str | None:
  """Why the kernels cannot take a call; None if they can."""
  if (reason := _dispatch.why_not_installed()) is not None:
    return reason
  module = _dispatch.kernel_module("cache_read.config")
  return module.selected_triton_supports(_call(q, states, index))


def triton(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
) -> Float[Array, "b t n v"]:
  """`selected_read`, as a kernel for GPUs."""
  module, config = _kernels(q, states, index)
  reads = module.fwd(
    *(q, states.astype(jnp.float32), pairs(weights)),
    tiles(index, states.shape[1], config.tile),
    config=config,
  )
  return sums(reads, index)


def triton_vjp(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  d_y: Float[Array, "b t n v"],
) -> tuple[
  Float[Array, "b t n k"],
  Float[Array, "b s n k v"],
  Float[Array, "b t n r"],
]:
  """Its gradients."""
  module, config = _kernels(q, states, index)
  d_q, d_states, d_weights = module.bwd(
    *(q, states.astype(jnp.float32), pairs(weights)),
    tiles(index, states.shape[1], config.tile),
    d_y.astype(q.dtype),
    config=config,
  )
  return (
    sums(d_q, index).astype(q.dtype),
    d_states.astype(states.dtype),
    of_tokens(d_weights, index).astype(weights.dtype),
  )


def _call(q, states, index):
  return _selected_kernels.call(q, index, states.shape[1], states.shape[4])


def _kernels(q, states, index) -> tuple[ModuleType, Any]:
  module = _dispatch.kernel_module("cache_read.config")
  config = module.selected_triton_config(_call(q, states, index))
  return _dispatch.kernel_module("cache_read.triton_selected"), config


def tiles(index: Int[Array, "b t n r"], slots: int, size: int) -> Any:
  """The kernels' `Tiles`, of a size."""
  module = _dispatch.kernel_module("cache_read.triton_selected")
  plan = make_plan(index, slots, size)
  pair = rearrange(plan.pair, "b n (p c) -> b p c n", c=size)
  # Empty tiles come last, and are of no state.
  state = jnp.where(pair[:, :, 0] >= 0, plan.memory, slots)
  edges = jnp.arange(slots + 1).reshape(1, -1, 1, 1)
  return module.Tiles(
    state=plan.memory,
    pair=rearrange(pair, "b p c n -> b (p c) n"),
    first=jnp.sum(state[:, None] < edges, axis=2, dtype=jnp.int32),
  )


def pairs(weights: Float[Array, "b t n r"]) -> Float[Array, "b m n"]:
  """Of each token r of them, one after the other."""
  return rearrange(weights.astype(jnp.float32), "b t n r -> b (t r) n")


def of_tokens(
  x: Float[Array, "b m n"], index: Int[Array, "b t n r"]
) -> Float[Array, "b t n r"]:
  """`pairs` undone; zeros where nothing was selected."""
  x = rearrange(x, "b (t r) n -> b t n r", r=index.shape[3])
  return jnp.where(index >= 0, x, 0.0)


def sums(
  x: Float[Array, "b m n v"], index: Int[Array, "b t n r"]
) -> Float[Array, "b t n v"]:
  """Of all pairs of a token, where something was selected."""
  x = rearrange(x, "b (t r) n v -> b t n r v", r=index.shape[3])
  return jnp.sum(jnp.where(index[..., None] >= 0, x, 0.0), axis=3)
