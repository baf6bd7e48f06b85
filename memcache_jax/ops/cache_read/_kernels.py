"""Between the op and its kernels: sizes and layouts."""

import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Float
from memcache_jax.ops import _dispatch


def why_not(
  q: Float[Array, "b t n k"], states: Float[Array, "b s n k v"]
) -> dict[str, str | None]:
  """Why kernels cannot take a call; None for those that can."""
  if (reason := _dispatch.why_not_installed()) is not None:
    return dict.fromkeys(("mosaic_tpu", "triton"), reason)
  module = _dispatch.kernel_module("cache_read.config")
  call = _call(module, q, states)
  return {
    "mosaic_tpu": module.supports(call),
    "triton": module.triton_supports(call),
  }


def mosaic_tpu(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  weights: Float[Array, "b t n s"],
) -> Float[Array, "b t n v"]:
  """`cache_read`, as a kernel for TPUs."""
  config = _config(q, states)
  module = _dispatch.kernel_module("cache_read.mosaic_tpu")
  y = module.fwd(
    _heads_first(q, config.rows),
    states,
    _tokens_last(weights, config.rows),
    config=config,
  )
  return _tokens_first(y, q)


def mosaic_tpu_vjp(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  weights: Float[Array, "b t n s"],
  d_y: Float[Array, "b t n v"],
) -> tuple[
  Float[Array, "b t n k"],
  Float[Array, "b s n k v"],
  Float[Array, "b t n s"],
]:
  """Its gradients."""
  config = _config(q, states)
  module = _dispatch.kernel_module("cache_read.mosaic_tpu_vjp")
  d_q, d_states, d_weights = module.bwd(
    _heads_first(q, config.rows),
    states,
    _tokens_last(weights, config.rows),
    _heads_first(d_y.astype(q.dtype), config.rows),
    config=config,
  )
  d_weights = rearrange(d_weights, "b n s t -> b t n s")[:, : q.shape[1]]
  return (
    _tokens_first(d_q, q),
    d_states.astype(states.dtype),
    d_weights.astype(weights.dtype),
  )


def triton(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  weights: Float[Array, "b t n s"],
) -> Float[Array, "b t n v"]:
  """`cache_read`, as a kernel for GPUs."""
  module = _dispatch.kernel_module("cache_read.triton")
  states = states.astype(jnp.float32)
  return module.fwd(q, states, weights, config=_triton_config(q, states))


def triton_vjp(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  weights: Float[Array, "b t n s"],
  d_y: Float[Array, "b t n v"],
) -> tuple[
  Float[Array, "b t n k"],
  Float[Array, "b s n k v"],
  Float[Array, "b t n s"],
]:
  """Its gradients."""
  d_q, d_states, d_weights = _dispatch.kernel_module(
    "cache_read.triton_vjp"
  ).bwd(
    *(q, states.astype(jnp.float32), weights, d_y.astype(q.dtype)),
    config=_triton_config(q, states),
  )
  return d_q, d_states.astype(states.dtype), d_weights.astype(weights.dtype)


def _triton_config(q, states):
  module = _dispatch.kernel_module("cache_read.config")
  return module.triton_config(_call(module, q, states))


def _config(q, states):
  module = _dispatch.kernel_module("cache_read.config")
  return module.config(_call(module, q, states))


def _call(module, q, states):
  _, slots, _, k, v = states.shape
  return module.Call(k, v, q.dtype.name, tokens=q.shape[1], states=slots)


def _heads_first(x, rows):
  return _fill(rearrange(x, "b t n k -> b n t k"), 2, rows)


def _tokens_last(weights, rows):
  weights = weights.astype(jnp.float32)
  return _fill(rearrange(weights, "b t n s -> b n s t"), 3, rows)


def _fill(x, axis, rows):
  """Zeros after the last token, up to whole blocks."""
  missing = [(0, 0)] * x.ndim
  missing[axis] = (0, -x.shape[axis] % rows)
  return jnp.pad(x, missing)


def _tokens_first(x, like):
  return rearrange(x, "b n t k -> b t n k")[:, : like.shape[1]]
