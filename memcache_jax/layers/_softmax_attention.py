"""Softmax attention over keys that carry their position and document."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int, Leaf

_LOW = -1e30  # a logit that exp turns into exactly 0, and finite


class Queries(NamedTuple):
  """Queries, scaled, and where they stand."""

  q: Float[Array, "b t n k"]  # rotated by their position
  plain: Float[Array, "b t n k"]  # not rotated, for keys without a position
  position: Int[Array, "b t"]  # in the document
  document: Int[Array, "b t"]  # number in the call; -1: reads nothing


class Keys(NamedTuple):
  """Keys and values, in any order.

  A query sees a key of its own document that is not later than itself; and
  every key without a position, which has no document and no batch axis either.
  """

  k: Float[Array, "... _m n k"]
  v: Float[Array, "... _m n v"]
  position: Leaf  # Int [b m], in the document; None: everyone sees the key
  document: Leaf  # Int [b m], number in the call; -1: nobody does


def attend(
  queries: Queries,
  own: Keys,
  others: Sequence[Keys] = (),
  *,
  window: int | None = None,
  chunk_size: int = 512,
) -> Float[Array, "b t n v"]:
  """Attends to the keys of the call itself and to others.

  Args:
    queries: query i has the position and document of key i.
    own: keys of this call, in order, [b t ...].
    others: keys of earlier calls, and those that everyone sees.
    window: see only this many positions, the query's own included.
    chunk_size: queries computed at a time, which bounds the memory taken.

  Returns:
    y in the dtype of q; arbitrary but finite for queries of document -1.
  """
  t = queries.q.shape[1]
  if t <= chunk_size or window is None or window + chunk_size >= t:
    return attend_stored(
      queries, (own, *others), window=window, chunk_size=chunk_size
    )
  # Chunk i sees only places i * chunk_size ... of the padded keys.
  after = -t % chunk_size
  padded = Keys(
    _pad(own.k, window, after),
    _pad(own.v, window, after),
    _pad(queries.position, window, after),
    _pad(queries.document + 1, window, after) - 1,
  )

  def chunk(index, queries):
    first, span = index * chunk_size, window + chunk_size
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, span, axis=1)
    keys = jax.tree.map(cut, padded)
    return _attend_chunk(queries, (keys, *others), window)

  return _in_chunks(chunk, queries, chunk_size)


def attend_stored(
  queries: Queries,
  stored: Sequence[Keys],
  *,
  window: int | None = None,
  chunk_size: int = 512,
) -> Float[Array, "b t n v"]:
  """Attends to stored keys only, among which are those of the queries."""

  def chunk(index, queries):
    del index
    return _attend_chunk(queries, stored, window)

  return _in_chunks(chunk, queries, chunk_size)


def _in_chunks(function, queries, chunk_size):
  """Calls a function of the number of a chunk and its queries [b c ...]."""
  t = queries.q.shape[1]
  if t <= chunk_size:
    return function(jnp.int32(0), queries)

  def split(x):
    x = _pad(x, 0, -t % chunk_size)
    x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  @jax.checkpoint
  def chunk(index, queries):
    return index + 1, function(index, queries)

  _, y = jax.lax.scan(chunk, jnp.int32(0), jax.tree.map(split, queries))
  y = jnp.moveaxis(y, 0, 1)
  return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :t]


def _attend_chunk(queries, sources, window):
  """Attention of a few queries to all keys of `sources`."""
  q, plain, position, document = queries
  logits = []
  for keys in sources:
    if keys.position is None:
      logit = jnp.einsum(
        "btnk,mnk->bntm", plain, keys.k, preferred_element_type=jnp.float32
      )
    else:
      logit = jnp.einsum(
        "btnk,bmnk->bntm", q, keys.k, preferred_element_type=jnp.float32
      )
      visible = _visible(position, document, keys, window)
      logit = jnp.where(visible[:, None], logit, _LOW)
    logits.append(logit)
  # Softmax over all sources without copying the (long) stored keys.
  top = [jnp.max(x, axis=-1, initial=_LOW, keepdims=True) for x in logits]
  top = jax.lax.stop_gradient(jnp.max(jnp.stack(top), axis=0))
  parts = [jnp.exp(x - top) for x in logits]
  total = sum(jnp.sum(x, axis=-1, keepdims=True) for x in parts)
  reads = [
    jnp.einsum(
      "bntm,mnv->btnv" if keys.position is None else "bntm,bmnv->btnv",
      (part / total).astype(q.dtype),
      keys.v,
      preferred_element_type=jnp.float32,
    )
    for part, keys in zip(parts, sources, strict=True)
  ]
  return sum(reads[1:], start=reads[0]).astype(q.dtype)


def _visible(position, document, keys, window):
  """[b t m]"""
  age = position[:, :, None] - keys.position[:, None]
  visible = (document[:, :, None] == keys.document[:, None]) & (age >= 0)
  visible &= (keys.document >= 0)[:, None]
  return visible if window is None else visible & (age < window)


def _pad(x, before, after):
  return jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
