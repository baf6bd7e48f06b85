"""Memories on the rows and heads that a device holds.

Rows and heads never mix in a memory. Said once here, it holds for whatever a
memory computes, and its kernels find all they need on their device.
"""

import jax

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params, State
from memcache_jax.memories._axes import (
  param_axes,
  state_axes,
  stored_axes,
  token_axes,
)
from memcache_jax.memories._base import Memory, Tokens
from memcache_jax.memories._watch import Watched
from memcache_jax.memories._watch import watch as watch_memory


def scan(
  memory: Memory, params: Params, state: State | None, tokens: Tokens
) -> tuple[Float[Array, "b t n v"], State]:
  """`memory.scan`, by every device on its own rows and heads."""
  if sharding.spec_of(tokens.q)[1] and memory.spreads_tokens:
    return memory.scan(params, state, tokens)
  return _run(memory.scan, memory, params, state, tokens, "b t n v")


def inspect(
  memory, params: Params, state: State | None, tokens: Tokens
) -> tuple[Float[Array, "b t n v"], State, Float[Array, "b t n s"]]:
  """`memory.inspect`, of a cached one, in the same way."""
  return _run(
    memory.inspect, memory, params, state, tokens, "b t n v", "b t n _"
  )


def read(
  memory: Memory, params: Params, stored: State, q: Float[Array, "b t n k"]
) -> Float[Array, "b t n v"]:
  """`memory.read`, in the same way."""
  return sharding.over_devices(
    lambda q, params, stored: memory.read(params, stored, q),
    (q, params, stored),
    ("b t n k", param_axes(params), stored_axes(stored)),
    "b t n v",
  )


def watch(memory: Memory, params: Params, tokens: Tokens) -> Watched:
  """`memories.watch`, in the same way."""
  watched = lambda tokens, params: watch_memory(memory, params, tokens)
  plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # not spread
  shapes = jax.eval_shape(watched, *jax.tree.map(plain, (tokens, params)))
  return sharding.over_devices(
    watched,
    (tokens, params),
    (token_axes(tokens), param_axes(params)),
    jax.tree.map(lambda x: "b t n", shapes),
  )


def _run(function, memory, params, state, tokens, of_y, *others):
  """A function that returns y, the state, and others, on each device's own."""
  if not any(sharding.spec_of(tokens.q)):
    return function(params, state, tokens)
  of_state = state_axes(memory, tokens.head_shape, tokens.q.shape[1], state)
  return sharding.over_devices(
    lambda tokens, params, state: function(params, state, tokens),
    (tokens, params, state),
    (
      token_axes(tokens),
      param_axes(params),
      None if state is None else of_state,
    ),
    (of_y, of_state, *others),
  )
