"""Relevance of stored memories to tokens: queries against pooled keys."""

import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.caching._aggregators import Aggregator
from memcache_jax.memories._base import Tokens


def pooled(
  aggregate: Aggregator,
  total: Float[Array, "*rows n k"],
  count: Int[Array, "*rows"],
) -> Float[Array, "*rows n k"]:
  """Pools a segment from the sum of its keys and how many they are."""
  if aggregate.pool == "sum":
    return total
  return total / jnp.maximum(count, 1)[..., None, None].astype(jnp.float32)


def route(
  aggregate: Aggregator,
  tokens: Tokens,
  keys: Float[Array, "b s n k"],
  own_key: Float[Array, "b t n k"] | None,
  index: Int[Array, "b s"],
  own_index: Int[Array, "b t"],
) -> tuple[Float[Array, "b t n s"] | None, Float[Array, "b t n"] | None]:
  """Logits of the cached memories and of the online one.

  Args:
    aggregate: says what to compare.
    tokens: the reading tokens.
    keys: pooled keys of the cached memories.
    own_key: pooled keys of each token's own segment, up to that token.
    index: number in its document of every cached segment.
    own_index: number in its document of each token's own segment.
  """
  match aggregate.router:
    case "none":
      return None, None
    case "input":
      logits = tokens.gates["slot_logits"].astype(jnp.float32)
      own = _slot(logits, own_index[..., None])[..., 0]
      return _slot(logits, index[:, None]), own
    case "shared":
      u = tokens.q
    case _:
      u = tokens.gates["u"]
  u = u.astype(jnp.float32)
  own = jnp.sum(u * own_key, axis=-1)
  return jnp.einsum("btnk,bsnk->btns", u, keys), own


def _slot(logits, index):
  """Logits by absolute segment; where there is none, `beyond` is True."""
  index = jnp.broadcast_to(
    index[:, :, None], (*logits.shape[:3], index.shape[-1])
  )
  return jnp.take_along_axis(
    logits, jnp.clip(index, 0, logits.shape[-1] - 1), axis=-1
  )


def beyond(
  cached, index: Int[Array, "*rows"], slots: int
) -> Bool[Array, "*rows"]:
  """Which segments have no right result: too much came before them.

  Args:
    cached: its segments know for how many the slots suffice, and its
      aggregator may know a limited number of them.
    index: number of the segment in its document.
    slots: memories that the state can hold.
  """
  limit = cached.limit(slots)
  if cached.aggregate.max_segments is not None:
    limit = min(limit, cached.aggregate.max_segments)
  return index >= limit
