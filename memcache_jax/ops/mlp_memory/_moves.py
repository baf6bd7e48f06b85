"""Moves of tokens between calls, rows and blocks."""

import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Int, Shaped


def put_tail(
  tail: Shaped[Array, "b w ..."],
  flat: Shaped[Array, "b t ..."],
  offset: Int[Array, " b"],
) -> Shaped[Array, "b w_and_t ..."]:
  """Puts the tail before the first token: [b t ...] to [b w+t ...]."""
  width = tail.shape[1]
  room = jnp.pad(flat, [(0, 0), (width, 0)] + [(0, 0)] * (flat.ndim - 2))
  index = offset[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
  return token_layout.put_rows(room, index, tail.astype(flat.dtype))


def take_tail(
  flat: Shaped[Array, "b w_and_t ..."],
  end: Int[Array, " b"],
  position: Int[Array, " b"],
  width: int,
) -> Shaped[Array, "b w ..."]:
  """The last tokens before `end` (counted without the tail in front)."""
  index = end[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
  x = token_layout.take_tokens(flat, index).astype(jnp.float32)
  steps = jnp.arange(width, 0, -1, dtype=jnp.int32)[None]
  keep = steps <= position[:, None]
  return jnp.where(keep.reshape(keep.shape + (1,) * (x.ndim - 2)), x, 0.0)


def split(
  x: Shaped[Array, "b t n ..."], size: int
) -> Shaped[Array, "g b n c ..."]:
  """[b t n ...] to [g b n c ...]."""
  b, t = x.shape[:2]
  return to_blocks(x.reshape(b, t // size, size, *x.shape[2:]))


def to_blocks(
  x: Shaped[Array, "b g c n ..."],
) -> Shaped[Array, "g b n c ..."]:
  """[b g c n ...] to [g b n c ...]."""
  return jnp.moveaxis(x, (0, 1, 2, 3), (1, 0, 3, 2))


def extend(
  flat: Shaped[Array, "b w_and_t n ..."], size: int, before: int
) -> Shaped[Array, "g b n e ..."]:
  """[b before+t n ...] to columns [g b n before+size ...]."""
  g = (flat.shape[1] - before) // size
  blocks = split(flat[:, before:], size)
  if not before:
    return blocks
  index = jnp.arange(g)[:, None] * size + jnp.arange(before)[None]
  tail = jnp.take(flat, index.reshape(-1), axis=1)
  tail = tail.reshape(flat.shape[0], g, before, *flat.shape[2:])
  return jnp.concatenate([to_blocks(tail), blocks], axis=3)
