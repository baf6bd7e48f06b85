"""Numbers at a few places of the last axis, and back, without scatters."""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float, Int

# Up to so many numbers are found by a maximum each, which takes a fraction of
# the time of `top_k`: its passes run over all rows in parallel.
_MOST_PASSES = 4


def largest(
  x: Float[Array, "*rows n s"], count: int
) -> Int[Array, "*rows n r"]:
  """Places of the `count` largest, in order; of equals the first."""
  # With heads before tokens, as relevance is computed, so that nothing moves.
  x = jnp.moveaxis(jax.lax.stop_gradient(x), -2, 1)
  if count == 0 or count > _MOST_PASSES:
    index = jax.lax.top_k(x, count)[1]
  else:
    index = jnp.moveaxis(_largest(jnp.moveaxis(x, -1, 2), count), 2, -1)
  return jnp.moveaxis(index, 1, -2)


def _largest(x, count):
  """Along axis 2, as `top_k` finds them; nan counts as infinity."""
  x = jnp.where(jnp.isnan(x), jnp.inf, x)
  size = x.shape[2]
  place = jnp.arange(size, dtype=jnp.int32)
  place = place.reshape(1, 1, -1, *(1,) * (x.ndim - 3))
  left, found = True, []
  for _ in range(count):
    most = jnp.max(jnp.where(left, x, -jnp.inf), axis=2, keepdims=True)
    first = jnp.where(left & (x == most), place, size)
    found.append(jnp.min(first, axis=2, keepdims=True))
    left = left & (place != found[-1])
  return jnp.concatenate(found, axis=2)


@jax.custom_jvp
def at(
  x: Float[Array, "*rows s"], index: Int[Array, "*rows r"]
) -> Float[Array, "*rows r"]:
  """The numbers at some places; anything where the place is -1."""
  return jnp.take_along_axis(x, jnp.maximum(index, 0), axis=-1)


@at.defjvp
def _at_jvp(primals, tangents):
  x, index = primals
  place, tangent = _places(x.shape[-1], index.ndim), tangents[0]
  # Its transpose spreads cotangents in one pass, where a scatter would write
  # one number after another.
  taken = [
    jnp.sum(jnp.where(index[..., r, None] == place, tangent, 0.0), axis=-1)
    for r in range(index.shape[-1])
  ]
  out = at(x, index)
  return out, jnp.stack(taken, axis=-1) if taken else jnp.zeros_like(out)


def spread(
  x: Float[Array, "*rows r"], index: Int[Array, "*rows r"], size: int
) -> Float[Array, "*rows s"]:
  """Puts numbers to their places among zeros; -1 for nowhere."""
  place, out = _places(size, index.ndim), 0.0
  for r in range(index.shape[-1]):
    out += jnp.where(index[..., r, None] == place, x[..., r, None], 0.0)
  return jnp.broadcast_to(out, (*index.shape[:-1], size))


def among(size: int, index: Int[Array, "*rows r"]) -> Bool[Array, "*rows s"]:
  """Which places of an axis are named."""
  named = jnp.any(index[..., None] == _places(size, index.ndim + 1), axis=-2)
  return named


def _places(size, ndim):
  return jnp.arange(size).reshape((1,) * (ndim - 1) + (-1,))
