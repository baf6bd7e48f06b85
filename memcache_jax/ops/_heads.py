"""Heads one after another, or all of them together."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import PyTree


def by_heads(
  function: Callable[..., PyTree],
  *inputs: PyTree,
  together: Callable[..., PyTree] | None = None,
) -> PyTree:
  """Calls a function of one head with each of them.

  On a CPU one after another: what is new in memory at every call costs several
  times as much there as what is computed with it, and one head at a time needs
  a fraction.

  Args:
    function: of arrays without axis 2, as its results are.
    *inputs: trees of arrays whose axis 2 is heads; the first leaf says whether
      they are spread over devices, which have to keep theirs.
    together: the same of all heads, where they are not taken in turn; None for
      the mapped function.
  """
  if together is None:
    together = lambda *inputs: jax.vmap(function, 2, 2)(*inputs)
  first = jax.tree.leaves(inputs)[0]
  if sharding.spec_of(first)[2] is not None:
    return together(*inputs)

  def in_turn(*inputs):
    def one(head):
      take = lambda x: jax.lax.dynamic_index_in_dim(x, head, 2, keepdims=False)
      return function(*jax.tree.map(take, inputs))

    y = jax.lax.map(one, jnp.arange(first.shape[2]))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), y)

  return jax.lax.platform_dependent(*inputs, cpu=in_turn, default=together)
