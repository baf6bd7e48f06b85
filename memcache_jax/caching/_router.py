"""Relevance of stored memories to tokens: queries against pooled keys."""

from typing import NamedTuple

import jax
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


class Relevance(NamedTuple):
  """Logits of the cached memories and of the online one; None without them.

  `scores` are those of the cached ones with what noise there is.
  """

  logits: Float[Array, "*rows s"] | None
  own: Float[Array, "*rows"] | None
  scores: Float[Array, "*rows s"] | None


def route(
  aggregate: Aggregator,
  tokens: Tokens,
  keys: Float[Array, "b s n k"],
  own_key: Float[Array, "b t n k"] | None,
  index: Int[Array, "b s"],
  own_index: Int[Array, "b t"],
) -> Relevance:
  """Relevance [b t n ...] of memories to tokens.

  Args:
    aggregate: says what to compare.
    tokens: the reading tokens.
    keys: pooled keys of the cached memories.
    own_key: pooled keys of each token's own segment, up to that token.
    index: number in its document of every cached segment.
    own_index: number in its document of each token's own segment.
  """
  if aggregate.router == "none":
    return Relevance(None, None, None)
  if aggregate.router == "input":
    slots = tokens.gates["slot_logits"].astype(jnp.float32)
    logits = _slot(slots, index[:, None])
    own = _slot(slots, own_index[..., None])[..., 0]
  else:
    u = tokens.q if aggregate.router == "shared" else tokens.gates["u"]
    u = u.astype(jnp.float32)
    logits = jnp.einsum("btnk,bsnk->btns", u, keys)
    own = jnp.sum(u * own_key, axis=-1)
  scores = logits
  if aggregate.draws and tokens.seeds is not None:
    scores = logits + _gumbel(tokens.seeds, index, logits.shape[2])
  return Relevance(logits, own, scores)


def _gumbel(seeds, index, heads) -> Float[Array, "b t n s"]:
  """Noise that a token's seed and a segment's number fix, in any call."""

  def draw(seed, index):
    # Of this kind whatever the default is: others ignore keys they are
    # mapped over.
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, index), (heads,))

  draw = jax.vmap(draw, (None, 0), 1)  # over segments
  draw = jax.vmap(draw, (0, None))  # over tokens
  return jax.vmap(draw)(seeds, index)


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
