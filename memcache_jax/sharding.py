"""Rows on the devices where their tokens are."""

import jax

from memcache_jax.array_typing import Array, PyTree, Shaped


def rows_like(tree: PyTree, like: Shaped[Array, "b ..."]) -> PyTree:
  """Spreads the first axis of every leaf as that of `like` is spread.

  Under a mesh with Explicit axes an array made from nothing, such as an empty
  state, belongs to no device, and cannot be carried along with arrays that
  do. Elsewhere the compiler decides, and the tree is returned as it is.
  """
  rows = _row_axes(like)
  if rows is None:
    return tree

  def spread(x):
    if _row_axes(x) == rows:
      return x
    return jax.reshard(x, jax.P(rows, *jax.typeof(x).sharding.spec[1:]))

  return jax.tree.map(spread, tree)


def _row_axes(x: Array):
  sharding = jax.typeof(x).sharding
  spec = getattr(sharding, "spec", None)
  return spec[0] if spec else None
