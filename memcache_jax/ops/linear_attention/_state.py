"""What linear attention carries from one call to the next."""

from typing import NamedTuple

import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float


class LinearAttentionState(NamedTuple):
  """What `linear_attention` carries from one call to the next, in float32.

  Attributes:
    matrix: the memory.
    keys: the last w - 1 keys of the running document, oldest first, zero
      where there are none; None for a window of one token.
    values: the values that belong to them.
  """

  matrix: Float[Array, "b n k v"]
  keys: Float[Array, "b tail n k"] | None = None
  values: Float[Array, "b tail n v"] | None = None


def init_state(
  k: Float[Array, "b t n k"], v: Float[Array, "b t n v"], window: int
) -> LinearAttentionState:
  """The state before the first token.

  It is built by contracting an empty slice of the inputs, which gives it
  their sharding on a mesh, whatever that is.
  """
  k0, v0 = k[:, :0].astype(jnp.float32), v[:, :0].astype(jnp.float32)
  matrix = jnp.einsum("btnk,btnv->bnkv", k0, v0)
  if window == 1:
    return LinearAttentionState(matrix)
  ones = jnp.ones((0, window - 1), jnp.float32)
  keys = jnp.einsum("btnk,tw->bwnk", k0, ones)
  return LinearAttentionState(
    matrix, keys, jnp.einsum("btnv,tw->bwnv", v0, ones)
  )
