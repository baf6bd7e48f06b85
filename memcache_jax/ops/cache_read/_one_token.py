"""Reading stored memories with one query each, as a decode step does."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, State


def read_one_token(
  read: Callable[[State, Float[Array, "r 1 n k"]], Float[Array, "r 1 n v"]],
  memories: State,
  q: Float[Array, "b 1 n k"],
  weights: Float[Array, "b 1 n s"],
) -> Float[Array, "b 1 n v"]:
  """The gated sum of the reads of stored memories, all of them at once.

  They are read in the order in which they lie: to lay them out anew, or to scan
  them, is to copy all of them, which costs many times as much as to read them.

  Args:
    read: reads memories [r n ...], one query each.
    memories: stored ones, leaves [b s n ...].
    q: queries.
    weights: gate of every memory.
  """
  b, s = jax.tree.leaves(memories)[0].shape[:2]
  rows = lambda x: x.reshape(b * s, *x.shape[2:])
  queries = jnp.broadcast_to(q, (b, s, *q.shape[2:]))
  y = read(jax.tree.map(rows, memories), rows(queries)[:, None])
  y = y.reshape(b, s, *y.shape[2:]).astype(jnp.float32)
  return jnp.einsum("btns,bsnv->btnv", weights, y, precision="highest")
