"""The inverse of a chunk's unit lower triangular matrix, in fast memory.

All diagonal blocks of 16 rows are solved together, row by row; blocks are then
joined as in the op's XLA form. Every factor is part of the inverse, hence no
larger than it: the powers of a series would grow and cancel.
"""

import jax
import jax.numpy as jnp

from ..linear_attention.mosaic_tpu import dot
from .operands import CHUNK

_TILE = 16


def inverse(strict: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """``(I + strict)^-1`` of a strictly lower triangular matrix [c c], float32.

  Args:
    strict: the matrix, float32.
    dtype: of the operands of products with the inverse; where it is bfloat16
      those in here have three parts, else full precision.
  """
  found, size = _tiles(strict), _TILE
  row, column = _places(0), _places(1)
  while size < CHUNK:
    before = jax.lax.div(row, size) - jax.lax.div(column, size) == 1
    below = jnp.where(before, strict, 0.0)
    starts = range(0, CHUNK, 2 * size)
    lower = jnp.concatenate([found[i + size : i + 2 * size] for i in starts])
    # Columns of `lower` are zero outside of its own block, and those of
    # `below` are multiplied with the block's inverse before it.
    lower -= _fine(_fine(lower, below, dtype), found, dtype)
    parts = []
    for at, i in enumerate(starts):
      parts += [found[i : i + size], lower[at * size : (at + 1) * size]]
    found = jnp.concatenate(parts)
    size *= 2
  return found


def _tiles(strict):
  """The inverses of its diagonal blocks, zero elsewhere."""
  row, lane = (
    jax.lax.broadcasted_iota(jnp.int32, (_TILE, CHUNK), i) for i in range(2)
  )
  count = CHUNK // _TILE
  # Side by side, so that one step is that of all blocks.
  tile, place = jax.lax.div(lane, _TILE), jax.lax.rem(lane, _TILE)
  of_tile = [tile == i for i in range(count)]
  packed = jnp.zeros((_TILE, CHUNK), jnp.float32)
  for i in range(count):
    rows = strict[i * _TILE : (i + 1) * _TILE]
    packed = jnp.where(of_tile[i], rows, packed)
  solved = jnp.where(row == place, 1.0, 0.0)
  for i in range(_TILE - 1):
    factor = jnp.take_along_axis(packed, tile * _TILE + i, axis=1)
    solved -= factor * solved[i : i + 1]
  return jnp.concatenate([jnp.where(x, solved, 0.0) for x in of_tile])


def _places(axis):
  return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis)


def _fine(a, b, dtype):
  """A product of float32."""
  if dtype == jnp.float32:
    return dot(a, b)
  high = [x.astype(dtype) for x in (a, b)]
  low = [
    (x - y.astype(jnp.float32)).astype(dtype)
    for x, y in zip((a, b), high, strict=True)
  ]
  return dot(high[0], high[1]) + dot(high[0], low[1]) + dot(low[0], high[1])
