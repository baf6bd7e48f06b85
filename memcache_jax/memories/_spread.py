"""Memories on the rows and heads that a device holds."""

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params, State
from memcache_jax.memories._base import (
  Memory,
  Tokens,
  param_axes,
  state_axes,
  token_axes,
)


def scan(
  memory: Memory, params: Params, state: State | None, tokens: Tokens
) -> tuple[Float[Array, "b t n v"], State]:
  """`memory.scan`, by every device on its own rows and heads.

  Rows and heads never mix in a memory. Said once here, it holds for whatever a
  memory computes, and its kernels find all they need on their device.
  """
  spec = sharding.spec_of(tokens.q)
  if not any(spec) or (spec[1] and memory.spreads_tokens):
    return memory.scan(params, state, tokens)

  def local(tokens, params, state):
    return memory.scan(params, state, tokens)

  of_state = state_axes(memory, tokens)
  return sharding.over_devices(
    local,
    (tokens, params, state),
    (
      token_axes(tokens),
      param_axes(params),
      None if state is None else of_state,
    ),
    ("b t n v", of_state),
  )
