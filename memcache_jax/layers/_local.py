"""Memories and attention on the rows and heads that a device holds."""

import jax

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params, PyTree, State
from memcache_jax.memories import HeadShape, Memory, Tokens


def scan(
  memory: Memory, params: Params, state: State | None, tokens: Tokens
) -> tuple[Float[Array, "b t n v"], State]:
  """`memory.scan`, by every device on its own rows and heads.

  Rows and heads never mix in a memory. Said once here, it holds for whatever a
  memory computes, and its kernels find all they need on their device.
  """
  if not any(sharding.spec_of(tokens.q)):
    return memory.scan(params, state, tokens)
  axes = _state_axes(memory, tokens)

  def local(tokens, params, state):
    return memory.scan(params, state, tokens)

  return sharding.over_batch_and_heads(
    local,
    (tokens, params, state),
    (
      jax.tree.map(lambda x: "b t n k"[: 2 * x.ndim - 1], tokens),
      jax.tree.map(lambda x: _letters("n", x.ndim), params),
      None if state is None else axes,
    ),
    ("b t n v", axes),
  )


def _letters(first: str, ndim: int) -> str:
  return " ".join([*first, *"_" * (ndim - len(first))])


def _state_axes(memory: Memory, tokens: Tokens) -> PyTree:
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
