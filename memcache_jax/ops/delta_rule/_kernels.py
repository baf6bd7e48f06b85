"""Between the op and its kernels: sizes, operands, layouts."""

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops import _dispatch
from memcache_jax.ops.delta_rule import _chunks


def why_not(
  q: Float[Array, "b t n k"], v: Float[Array, "b t n v"]
) -> dict[str, str | None]:
  """Why kernels cannot take a call; None for those that can."""
  reason = _dispatch.why_not_installed()
  if reason is None:
    module = _dispatch.kernel_module("delta_rule.config")
    reason = module.supports(_call(module, q, v))
  return dict.fromkeys(("mosaic_tpu", "triton"), reason)


def mosaic_tpu(*inputs) -> tuple[Array, Array]:
  """`delta_rule` as a kernel for TPUs; masked tokens come in as zeros."""
  q, _, v, *_ = inputs
  module = _dispatch.kernel_module("delta_rule.mosaic_tpu")
  y, state = module.fwd(_operands(*inputs), config=_config(q, v))
  return _tokens_first(y, q.shape[1]), state


def mosaic_tpu_vjp(*args) -> tuple[Array | None, ...]:
  """Its gradients: one for each input that is not a flag."""
  *inputs, (d_y, d_state) = args
  flags = inputs[7:]
  operands, transpose = jax.vjp(
    lambda *floats: _operands(*floats, *flags), *inputs[:7]
  )
  q, _, v, *_ = inputs
  missing = operands.q.shape[2] - q.shape[1]
  d_y = rearrange(d_y.astype(q.dtype), "b t n v -> b n t v")
  d_y = jnp.pad(d_y, [(0, 0), (0, 0), (0, missing), (0, 0)])
  module = _dispatch.kernel_module("delta_rule.mosaic_tpu_vjp")
  return transpose(module.bwd(operands, d_y, d_state, config=_config(q, v)))


def triton(*inputs) -> tuple[Array, Array]:
  """`delta_rule` as kernels for GPUs; masked tokens come in as zeros."""
  config = _triton_config(*inputs)
  module = _dispatch.kernel_module("delta_rule.triton")
  return module.fwd(_triton_operands(config, *inputs), config=config)


def triton_vjp(*args) -> tuple[Array | None, ...]:
  """Its gradients: one for each input that is not a flag."""
  *inputs, (d_y, d_state) = args
  config, flags = _triton_config(*inputs), inputs[7:]
  operands, transpose = jax.vjp(
    lambda *floats: _triton_operands(config, *floats, *flags), *inputs[:7]
  )
  d_y = d_y.astype(operands.q.dtype)
  module = _dispatch.kernel_module("delta_rule.triton_vjp")
  return transpose(module.bwd(operands, d_y, d_state, config=config))


def _triton_config(*inputs):
  q, _, v, *_ = inputs
  module = _dispatch.kernel_module("delta_rule.config")
  return module.triton_config(_call(module, q, v))


def _triton_operands(
  config,
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  beta: Float[Array, "b t n"],
  log_decay: Float[Array, "b t n"] | None,
  state: Float[Array, "b n k v"],
  initial: Float[Array, "b n k v"] | None,
  starts: Bool[Array, "b t"] | None = None,
):
  """Tokens as they are; only numbers of them fill up the last chunk."""
  scalars = _scalars(
    *(beta, log_decay, starts, initial is not None), config.chunk
  )
  module = _dispatch.kernel_module("delta_rule.operands")
  return module.Operands(q, k, v, scalars, state, initial)


def _config(q, v):
  module = _dispatch.kernel_module("delta_rule.config")
  return module.config(_call(module, q, v))


def _call(module, q, v):
  return module.Call(q.shape[-1], v.shape[-1], q.dtype.name, heads=q.shape[2])


def _tokens_first(x, tokens):
  return rearrange(x, "b n t k -> b t n k")[:, :tokens]


def _operands(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  beta: Float[Array, "b t n"],
  log_decay: Float[Array, "b t n"] | None,
  state: Float[Array, "b n k v"],
  initial: Float[Array, "b n k v"] | None,
  starts: Bool[Array, "b t"] | None = None,
):
  """What the kernels take: whole chunks, and every number that is small."""
  module = _dispatch.kernel_module("delta_rule.operands")
  size = module.CHUNK
  pad = [(0, 0), (0, 0), (0, -q.shape[1] % size), (0, 0)]
  tokens = [jnp.pad(rearrange(x, "b t n k -> b n t k"), pad) for x in (q, k, v)]
  scalars = _scalars(beta, log_decay, starts, initial is not None, size)
  return module.Operands(*tokens, scalars, state, initial)


def _scalars(beta, log_decay, starts, starting, size):
  """The numbers of tokens in chunks [b n 8 t], of whole chunks.

  `starting` says whether there is a memory that a document starts with.
  """
  beta = _chunks.split(beta.astype(jnp.float32), size)
  decay = jnp.zeros_like(beta)
  if log_decay is not None:
    decay = _chunks.split(log_decay.astype(jnp.float32), size)
  fresh = jnp.zeros_like(beta)
  if starts is not None:
    starts = _chunks.split_starts(starts, size)
    if starting:
      fresh = _chunks.since_start(jnp.exp(decay), starts)
    # A start forgets everything, as a decay of zero does.
    decay = jnp.where(starts[:, :, None], -jnp.inf, decay)
  logs, resets = numerics.running_log_decay(decay)
  carry = numerics.masked_exp(logs, resets == 0)
  end = numerics.masked_exp(logs[..., -1:] - logs, resets == resets[..., -1:])
  last = lambda x: jnp.broadcast_to(x[..., -1:], x.shape)
  rows = (beta, logs, resets, carry, end, last(carry), fresh, last(fresh))
  return rearrange(jnp.stack(rows, 3), "b g n s c -> b n s (g c)")
