"""From the arguments of a call to what the kernels take.

Everything that is small, one number per token, head and memory, is computed
here: decay products as differences of sums of logs, and which states a token
may read. Written this way a segment that goes on from the one before needs
nothing of its own: its online memory is what it wrote itself, plus the end
state before it, which is one more stored state to read.
"""

import jax.numpy as jnp
from einops import rearrange

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops.cached_linear_attention._inputs import (
  Cut,
  Inputs,
  fresh_segments,
  readable,
)


def token_operands(
  inputs: Inputs, fresh: Bool[Array, "b g"] | None, cut: Cut
) -> tuple[Float[Array, "b ..."] | None, ...]:
  """The fields of the GPU kernels' `TokenOperands`, in order."""
  scalars = _numbers(inputs.own_weight, 0)[:, :, None]
  if is_chained(inputs, cut) or has_decay(inputs):
    pad = cut.segments * cut.length - cut.tokens
    own = _numbers(inputs.own_weight, pad)
    scalars, carry = _decayed(inputs, fresh, cut, own)
    scalars = jnp.concatenate([scalars, carry[:, :, None]], axis=2)
    scalars = scalars[..., : cut.tokens]
  state = None if inputs.state is None else inputs.state[:, None]
  return (*inputs[:4], scalars, inputs.memories, state)


def kernel_operands(
  inputs: Inputs, fresh: Bool[Array, "b g"] | None, cut: Cut, segments: int
) -> tuple[Float[Array, "b ..."] | None, ...]:
  """The fields of the TPU kernels' `Operands`, in order.

  Args:
    inputs: of the call.
    fresh: as in the call.
    cut: of the call.
    segments: to fill it up to.
  """
  state = inputs.state
  pad = segments * cut.length - cut.tokens
  weights = readable(inputs.weights, cut)
  memories = inputs.memories
  if state is not None:
    # What the first segment goes on from is the last memory carried.
    before, after = weights[..., : cut.carried], weights[..., cut.carried :]
    none = jnp.zeros((*weights.shape[:3], 1), jnp.float32)
    weights = jnp.concatenate([before, none, after], axis=-1)
    parts = [] if memories is None else [memories]
    memories = jnp.concatenate([*parts, state[:, None]], axis=1)
  # Gates with tokens last; whole registers of slots, the last ones unread.
  unread = segments - cut.segments
  unread += -(weights.shape[3] + unread) % 8
  weights = jnp.pad(
    rearrange(weights, "b t n s -> b n s t"),
    [(0, 0), (0, 0), (0, unread), (0, pad)],
  )
  own = _numbers(inputs.own_weight, pad)
  if not (is_chained(inputs, cut) or has_decay(inputs)):
    scalars = own[:, :, None]
  else:
    scalars, carry = _decayed(inputs, fresh, cut, own)
    weights = _read_on(weights, carry, cut, memories)
  tokens = [
    jnp.pad(
      rearrange(x, "b t n k -> b n t k"), [(0, 0), (0, 0), (0, pad), (0, 0)]
    )
    for x in (inputs.q, inputs.k, inputs.v)
  ]
  return (*tokens, weights, scalars, memories)


def is_chained(inputs: Inputs, cut: Cut) -> bool:
  """Whether any segment goes on from a state before it."""
  return cut.write_mode == "checkpoint" or inputs.state is not None


def has_decay(inputs: Inputs) -> bool:
  return inputs.log_decay is not None or inputs.write is not None


def _numbers(x, pad):
  x = rearrange(x.astype(jnp.float32), "b t n -> b n t")
  return jnp.pad(x, [(0, 0), (0, 0), (0, pad)])


def _decayed(inputs, fresh, cut, own):
  """Scalars [b n 6 t], and the share of what stood before that each reads."""
  b, n, t = own.shape
  pad = t - cut.tokens
  zeros = jnp.zeros_like(own)
  log_decay, write = zeros, zeros + 1
  if inputs.log_decay is not None:
    log_decay = _numbers(inputs.log_decay, pad)
  if inputs.write is not None:
    write = _numbers(inputs.write, pad)
  grid = lambda x: rearrange(x, "b n (g c) -> b n g c", c=cut.length)
  logs, resets = numerics.running_log_decay(grid(log_decay))
  end = numerics.masked_exp(logs[..., -1:] - logs, resets == resets[..., -1:])
  end = grid(write) * end
  goes_on = ~fresh_segments(fresh, cut, b)
  if inputs.state is None:
    goes_on &= (jnp.arange(cut.segments) > 0)[None]
  goes_on = jnp.pad(goes_on, [(0, 0), (0, logs.shape[2] - cut.segments)])
  carry = numerics.masked_exp(logs, (resets == 0) & goes_on[:, None, :, None])
  keep = jnp.broadcast_to(carry[..., -1:], carry.shape)
  rows = (grid(own), logs, resets, grid(write), end, keep)
  scalars = jnp.stack([rearrange(x, "b n g c -> b n (g c)") for x in rows], 2)
  return scalars, own * rearrange(carry, "b n g c -> b n (g c)")


def _read_on(weights, carry, cut, memories):
  """Adds the read of the state that each token's segment goes on from."""
  carried = 0 if memories is None else memories.shape[1]
  before = jnp.arange(weights.shape[3]) // cut.length + carried - 1
  slot = jnp.arange(weights.shape[2])
  here = (slot[:, None] == before[None])[None, None]
  return weights + jnp.where(here, carry[:, :, None], 0.0)
