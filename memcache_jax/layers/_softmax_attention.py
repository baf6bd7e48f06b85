"""Softmax attention over keys that carry their position and document."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int

_LOW = -1e30  # a logit that exp turns into exactly 0, and finite


class Keys(NamedTuple):
  """Keys and values, in any order.

  A query sees a key of its own document that is not later than itself.
  """

  k: Float[Array, "b _m n k"]
  v: Float[Array, "b _m n v"]
  position: Int[Array, "b _m"]  # in the document
  document: Int[Array, "b _m"]  # number in the call; -1: nobody sees the key


def attend(
  q: Float[Array, "b t n k"],
  own: Keys,
  stored: Keys | None = None,
  *,
  window: int | None = None,
  chunk_size: int = 512,
) -> Float[Array, "b t n v"]:
  """Attends to the keys of the call itself and to stored ones.

  Args:
    q: queries, scaled; query i has the position and document of key i.
    own: keys of this call, in order, [b t ...].
    stored: keys of earlier calls.
    window: see only this many positions, the query's own included.
    chunk_size: queries computed at a time, which bounds the memory taken.

  Returns:
    y in the dtype of q; arbitrary but finite for queries of document -1.
  """
  t = q.shape[1]
  if t <= chunk_size:
    return _attend_chunk(q, own.position, own.document, (own, stored), window)
  chunks = -(-t // chunk_size)
  queries = (q, own.position, own.document)
  queries = [_pad(x, 0, chunks * chunk_size - t) for x in queries]
  queries = [
    jnp.moveaxis(x.reshape(x.shape[0], chunks, chunk_size, *x.shape[2:]), 1, 0)
    for x in queries
  ]
  span = t if window is None else window + chunk_size
  sliced = window is not None and span < t
  if sliced:
    # Chunk i then sees only places i * chunk_size ... of the padded keys.
    after = chunks * chunk_size - t
    own = Keys(
      _pad(own.k, window, after),
      _pad(own.v, window, after),
      _pad(own.position, window, after),
      _pad(own.document + 1, window, after) - 1,
    )

  @jax.checkpoint
  def chunk(index, queries):
    keys = own
    if sliced:
      first = index * chunk_size
      cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, span, axis=1)
      keys = jax.tree.map(cut, own)
    q, position, document = queries
    y = _attend_chunk(q, position, document, (keys, stored), window)
    return index + 1, y

  _, y = jax.lax.scan(chunk, jnp.int32(0), tuple(queries))
  y = jnp.moveaxis(y, 0, 1)
  return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :t]


def attend_stored(
  q: Float[Array, "b t n k"],
  position: Int[Array, "b t"],
  document: Int[Array, "b t"],
  stored: Keys,
  *,
  window: int | None = None,
) -> Float[Array, "b t n v"]:
  """Attends to stored keys only, among which are those of the queries."""
  return _attend_chunk(q, position, document, (stored, None), window)


def _attend_chunk(q, position, document, sources, window):
  """Attention of a few queries to all keys of `sources`, which may be None."""
  sources = [keys for keys in sources if keys is not None]
  logits = []
  for keys in sources:
    logit = jnp.einsum(
      "btnk,bmnk->bntm", q, keys.k, preferred_element_type=jnp.float32
    )
    visible = _visible(position, document, keys, window)
    logits.append(jnp.where(visible[:, None], logit, _LOW))
  # Softmax over all sources without copying the (long) stored keys.
  top = [jnp.max(x, axis=-1, initial=_LOW, keepdims=True) for x in logits]
  top = jax.lax.stop_gradient(jnp.max(jnp.stack(top), axis=0))
  parts = [jnp.exp(x - top) for x in logits]
  total = sum(jnp.sum(x, axis=-1, keepdims=True) for x in parts)
  reads = [
    jnp.einsum(
      "bntm,bmnv->btnv",
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
