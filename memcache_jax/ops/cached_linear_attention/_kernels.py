"""Between the op and its kernels: sizes, operands, layouts."""

import jax
import jax.numpy as jnp

from memcache_jax.ops import _dispatch
from memcache_jax.ops.cached_linear_attention._inputs import Cut, Inputs
from memcache_jax.ops.cached_linear_attention._kernel_operands import (
  is_chained,
  kernel_operands,
  token_operands,
)


def has_kernel(
  key_dim: int,
  value_dim: int,
  dtype: str,
  *,
  segment_length: int,
  segments: int,
  carried: int,
  implementation: _dispatch.Implementation | None,
) -> bool:
  """Whether a call with such sizes may run as a kernel.

  Args:
    key_dim: width of queries and keys.
    value_dim: width of values.
    dtype: of these.
    segment_length: tokens of a segment.
    segments: of the call.
    carried: memories carried into the call, with its state.
    implementation: as in the call; an explicit one is taken at its word.
  """
  if implementation is not None:
    return implementation in ("mosaic_tpu", "triton")
  reasons = why_not(
    k=key_dim,
    v=value_dim,
    dtype=dtype,
    segment_length=segment_length,
    segments=segments,
    carried=carried,
  )
  return _dispatch.runs_unasked(reasons)


def why_not(**sizes) -> dict[str, str | None]:
  """Why kernels cannot take a call of such sizes; None for those that can."""
  if (reason := _dispatch.why_not_installed()) is not None:
    return dict.fromkeys(("mosaic_tpu", "triton"), reason)
  config = _kernel_config()
  call = config.Call(**sizes)
  return {
    "mosaic_tpu": config.supports(call),
    "triton": config.triton_supports(call),
  }


def _kernel_config():
  return _dispatch.kernel_module("linear_attention.config")


def sizes(inputs: Inputs, cut: Cut) -> dict:
  """The sizes of a call, as the kernels ask for them."""
  return {
    "k": inputs.q.shape[-1],
    "v": inputs.v.shape[-1],
    "dtype": inputs.q.dtype.name,
    "segment_length": cut.length,
    "segments": cut.segments,
    "carried": cut.carried + (inputs.state is not None),
  }


def _config(inputs: Inputs, cut: Cut):
  """The pieces of a call, and its segments filled up to whole blocks."""
  module = _kernel_config()
  config = module.config(module.Call(**sizes(inputs, cut)))
  block = config.segments_per_block
  return config, -(-cut.segments // block) * block


def mosaic_tpu(cut, inputs, fresh):
  config, segments = _config(inputs, cut)
  module = _dispatch.kernel_module("linear_attention.mosaic_tpu")
  y, ends = module.fwd(
    module.Operands(*kernel_operands(inputs, fresh, cut, segments)),
    segment_length=cut.length,
    chained=is_chained(inputs, cut),
    config=config,
  )
  return jnp.swapaxes(y, 1, 2)[:, : cut.tokens], ends[:, : cut.segments]


def mosaic_tpu_vjp(cut, inputs, fresh, ends, gradients):
  config, segments = _config(inputs, cut)
  module = _dispatch.kernel_module("linear_attention.mosaic_tpu_vjp")
  d_y, d_ends = gradients
  fill = lambda x, axis, count: jnp.pad(
    x, [(0, count if i == axis else 0) for i in range(x.ndim)]
  )
  prepare = lambda inputs: kernel_operands(inputs, fresh, cut, segments)
  operands, transpose = jax.vjp(prepare, inputs)
  d_operands = module.bwd(
    module.Operands(*operands),
    fill(ends, 1, segments - cut.segments),
    fill(jnp.swapaxes(d_y, 1, 2), 2, segments * cut.length - cut.tokens),
    fill(d_ends, 1, segments - cut.segments),
    segment_length=cut.length,
    chained=is_chained(inputs, cut),
    config=config,
  )
  return transpose(tuple(d_operands))[0]


def _triton_options(inputs: Inputs, cut: Cut) -> dict:
  module = _kernel_config()
  linked = cut.segments if cut.write_mode == "checkpoint" else 1
  return {
    "segment_length": cut.length,
    "linked": linked if is_chained(inputs, cut) else 0,
    "config": module.triton_config(module.Call(**sizes(inputs, cut))),
  }


def triton(cut, inputs, fresh):
  module = _dispatch.kernel_module("linear_attention.triton")
  operands = module.TokenOperands(*token_operands(inputs, fresh, cut))
  return module.fwd(operands, **_triton_options(inputs, cut))


def triton_vjp(cut, inputs, fresh, ends, gradients):
  module = _dispatch.kernel_module("linear_attention.triton_vjp")
  prepare = lambda inputs: token_operands(inputs, fresh, cut)
  operands, transpose = jax.vjp(prepare, inputs)
  d_operands = module.bwd(
    module.TokenOperands(*operands),
    *(ends, *gradients),
    **_triton_options(inputs, cut),
  )
  return transpose(tuple(d_operands))[0]
