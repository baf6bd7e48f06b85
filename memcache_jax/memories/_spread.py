"""Memories on the rows and heads that a device holds."""

import jax

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params, PyTree, State
from memcache_jax.memories._base import HeadShape, Memory, Tokens


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


def token_axes(tokens: Tokens) -> PyTree:
  """Letters of the axes of tokens, see `sharding.over_axes`."""
  return jax.tree.map(lambda x: "b t n k"[: 2 * x.ndim - 1], tokens)


def param_axes(params: Params) -> PyTree:
  """Letters of the axes of parameters: heads first."""
  return jax.tree.map(lambda x: " ".join("n" + "_" * (x.ndim - 1)), params)


def state_axes(memory: Memory, tokens: Tokens) -> PyTree:
  """Letters of the axes of a state, seen by what changes with which size."""
  shape, length = tokens.head_shape, tokens.q.shape[1]

  def sizes(batch, heads):
    inner = HeadShape(heads, *shape[1:])

    def make():
      params = memory.init_params(jax.random.key(0), inner)
      return memory.init_state(params, inner, batch, max_length=length)

    return jax.eval_shape(make)

  def letters(base, rows, heads):
    one = lambda x, row, head: "b" if row != x else "n" if head != x else "_"
    return " ".join(map(one, base.shape, rows.shape, heads.shape))

  return jax.tree.map(letters, sizes(2, 2), sizes(3, 2), sizes(2, 3))
