"""Letters of the axes of what memories take and give: see `sharding`."""

from typing import Any

import jax

from memcache_jax.array_typing import Params, PyTree, State
from memcache_jax.memories._gate import HeadShape
from memcache_jax.memories._tokens import Tokens

_LONG = 2**20  # tokens; nothing of this size is made


def token_axes(tokens: Tokens) -> PyTree:
  """Letters of the axes of tokens, see `sharding.over_devices`."""
  return jax.tree.map(lambda x: "b t n k"[: 2 * x.ndim - 1], tokens)


def param_axes(params: Params) -> PyTree:
  """Letters of the axes of parameters: heads first."""
  return jax.tree.map(lambda x: " ".join("n" + "_" * (x.ndim - 1)), params)


def stored_axes(stored: State) -> PyTree:
  """Letters of the axes of what `Memory.snapshot` returns: rows, then heads."""
  return jax.tree.map(lambda x: " ".join("bn" + "_" * (x.ndim - 2)), stored)


def state_axes(
  memory: Any, shape: HeadShape, length: int, state: State | None = None
) -> PyTree:
  """Letters of the axes of a state, seen by what changes with which size.

  A state with more room than a call of this length needs may have parts that
  one of just that room would not have.
  """
  axes = _axes_with_room(memory, shape, length)
  if state is None or jax.tree.structure(axes) == jax.tree.structure(state):
    return axes
  return _axes_with_room(memory, shape, _LONG)


def _axes_with_room(memory, shape, length):
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
