"""Relevance of stored memories to tokens: queries against pooled keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.caching import _ranks
from memcache_jax.caching._aggregators import Aggregator
from memcache_jax.memories._base import Tokens
from memcache_jax.ops._heads import by_heads


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
    u = _queries(aggregate, tokens)
    logits = jnp.einsum("btnk,bsnk->btns", u, keys)
    assert own_key is not None
    own = numerics.dot_rows(u, own_key)
  scores = logits
  if aggregate.draws and tokens.seeds is not None:
    scores = logits + _gumbel(tokens.seeds, index, logits.shape[2])
  return Relevance(logits, own, scores)


def _queries(aggregate, tokens):
  u = tokens.q if aggregate.router == "shared" else tokens.gates["u"]
  return u.astype(jnp.float32)


def at_chosen(
  aggregate: Aggregator,
  tokens: Tokens,
  keys: Float[Array, "b s n k"],
  logits: Float[Array, "b g c n r"],
  index: Int[Array, "b g c n r"],
) -> Float[Array, "b g c n r"]:
  """The logits of the few memories that tokens [b g c ...] chose.

  Their gradient is not that of all logits, most of which would be zeros, where
  moving rows is cheaper than multiplying by zeros. It is one in reverse.
  """
  flat = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
  u = flat(_queries(aggregate, tokens))
  return _compare(u, keys, flat(logits), flat(index)).reshape(index.shape)


@jax.custom_vjp
def _compare(u, keys, logits, index):
  del u, keys, index  # of which the logits are made
  return logits


def _gradients_of_compare(inputs, g):
  u, keys, index = inputs
  g = jnp.where(index >= 0, g, 0.0)
  d_u, d_keys = by_heads(_by_rows, u, keys, index, g, together=_by_products)
  return d_u, d_keys, None, None


_compare.defvjp(
  lambda u, keys, logits, index: (
    _compare(u, keys, logits, index),
    (u, keys, index),
  ),
  _gradients_of_compare,
)


def _by_products(u, keys, index, g):
  g = _ranks.spread(g, index, keys.shape[1])
  d_u = jnp.einsum("btns,bsnk->btnk", g, keys)
  return d_u, jnp.einsum("btns,btnk->bsnk", g, u)


def _by_rows(u, keys, index, g):
  """The same of one head: u [b t k], keys [b s k]."""
  place = jnp.maximum(index, 0)
  take = jax.vmap(lambda x, i: x[i])
  add = jax.vmap(lambda x, i, rows: x.at[i].add(rows))
  d_u, d_keys = jnp.zeros_like(u), jnp.zeros_like(keys)
  for r in range(index.shape[-1]):
    one, i = g[..., r, None], place[..., r]
    d_u += one * take(keys, i)
    d_keys = add(d_keys, i, one * u)
  return d_u, d_keys


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
