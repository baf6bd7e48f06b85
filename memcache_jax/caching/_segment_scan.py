"""Many tokens of a cached memory: all segments of a call together."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Float, Int, State
from memcache_jax.caching import _layout, _next_state, _router
from memcache_jax.caching._one_token import memory_tokens
from memcache_jax.caching._next_state import Segments
from memcache_jax.memories._base import HeadShape, Tokens, select_rows


def run(cached, params, state, tokens):
  """Writes and reads many tokens; returns y, state and weights."""
  position = None if state is None else state.position
  layout = _layout.lay_out(tokens, position, cached.segments)
  inner = Tokens(tokens.q, tokens.k, tokens.v, dict(tokens.gates))
  inner = layout.spread(inner)
  segments = _describe(cached, state, layout, inner.k)
  slots = 0 if state is None else state.index.shape[1]
  y, start, ends, online = _write(cached, params, state, layout, inner)

  stored = _stored(state, ends, segments, cached.aggregate)
  weights, own = _weigh(cached, stored, segments, inner)
  if cached.aggregate.mixes_parameters and not cached.memory.reads_linearly:
    y = _soup(cached, params, layout, inner, start, stored, weights, own)
  else:
    y = own[..., None] * y.astype(jnp.float32)
    y = y + _read_stored(cached, params, inner.q, stored, weights)
  if state is not None:
    lost = (segments.index > slots)[:, :, None, None, None]
    y = jnp.where(lost, jnp.nan, y)
  y = layout.collect(y.astype(tokens.v.dtype))
  weights = jnp.concatenate([weights, own[..., None]], axis=-1)
  weights = layout.collect(weights)
  state = _next_state.advance(
    cached, params, state, tokens, layout, segments, ends, online
  )
  return y, state, weights


def _describe(cached, state, layout, k) -> Segments:
  b, g, c, _, _ = k.shape
  k = k.astype(jnp.float32)
  running = jnp.cumsum(k, axis=2)
  if layout.valid is None:
    count = jnp.broadcast_to(jnp.arange(1, c + 1)[None, None], (b, g, c))
  else:
    count = jnp.cumsum(layout.valid, axis=2, dtype=jnp.int32)
  fresh = layout.fresh
  if fresh is None:
    fresh = jnp.zeros((b, g), bool)
  document = jnp.cumsum(fresh, axis=1, dtype=jnp.int32)
  block = jnp.arange(g, dtype=jnp.int32)[None]
  first = jax.lax.cummax(jnp.where(fresh, block, 0), axis=1)
  index = block - first
  if state is not None:
    old = document == 0
    index = index + jnp.where(old, state.count[:, None], 0)
    # A document start empties the open segment, if it was not empty already.
    goes_on = old[:, 0]
    running = running.at[:, 0].add(
      jnp.where(goes_on[:, None, None], state.pool, 0.0)[:, None]
    )
    count = count.at[:, 0].add(
      jnp.where(goes_on, state.position, 0)[:, None]
    )
  complete = count[:, :, -1] == c
  return Segments(count, running[:, :, -1], running, index, document, complete)


def _write(cached, params, state, layout, tokens):
  """Online reads [b g c n v], start and end states [b g ...], last state."""
  memory = cached.memory
  tokens = memory_tokens(memory, tokens, layout.valid)
  b, g, _, n, k = tokens.q.shape
  shape = HeadShape(n, k, tokens.v.shape[-1])
  initial = memory.init_state(params, shape, b)
  first = initial if state is None else state.online
  if cached.write_mode == "independent":
    return _write_independent(memory, params, state, layout, tokens, initial)

  def segment(carry, inputs):
    tokens, fresh = inputs
    carry = select_rows(fresh, initial, carry)
    y, end = memory.scan(params, carry, tokens)
    return end, (y, carry, memory.snapshot(end))

  fresh = layout.fresh
  if fresh is None:
    fresh = jnp.zeros((b, g), bool)
  inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, fresh))
  online, outputs = jax.lax.scan(segment, first, inputs)
  y, start, ends = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
  return y, start, ends, online


def _write_independent(memory, params, state, layout, tokens, initial):
  b, g = tokens.q.shape[:2]
  start = jax.tree.map(
    lambda x: jnp.broadcast_to(x[:, None], (b, g, *x.shape[1:])), initial
  )
  folded_start = None
  if state is not None:
    first = state.online
    if layout.fresh is not None:
      first = select_rows(layout.fresh[:, 0], initial, first)
    start = jax.tree.map(lambda x, y: x.at[:, 0].set(y), start, first)
    folded_start = _fold(start)
  y, end = memory.scan(params, folded_start, _fold(tokens))
  ends = _unfold(memory.snapshot(end), g)
  end = _unfold(end, g)
  if isinstance(layout.last, int):
    online = jax.tree.map(lambda x: x[:, layout.last], end)
  else:
    online = _next_state.take_block(end, layout.last)
  return _unfold(y, g), start, ends, online


class _Stored(NamedTuple):
  """Memories that tokens of this call may read: carried and new ones."""

  memories: State
  keys: Float[Array, "b s n k"]
  index: Int[Array, "b s"]
  document: Int[Array, "b s"]
  block: Int[Array, " s"]  # readable in later blocks only; -1: carried


def _stored(state, ends, segments, aggregate) -> _Stored:
  # Nothing of this call comes after its last segment, so that one is left out.
  keys = _router.pooled(aggregate, segments.total, segments.count[:, :, -1])
  g = keys.shape[1]
  new = _Stored(
    ends, keys, segments.index, segments.document, jnp.arange(g)
  )
  new = _Stored(
    *jax.tree.map(lambda x: x[:, :-1], new[:4]), new.block[:-1]
  )
  if state is None:
    return new
  slots = state.index.shape[1]
  old = _Stored(
    state.memories,
    state.keys,
    state.index,
    jnp.where(state.index >= 0, 0, -1),
    jnp.full((slots,), -1),
  )
  both = jax.tree.map(
    lambda a, b: jnp.concatenate([a, b], axis=1), old[:4], new[:4]
  )
  return _Stored(*both, jnp.concatenate([old.block, new.block]))


def _weigh(cached, stored, segments, tokens):
  """Weights [b g c n s] of the stored memories and [b g c n] of the own."""
  aggregate = cached.aggregate
  b, g, c, n, _ = tokens.q.shape
  block = jnp.arange(g)
  readable = segments.document[:, :, None] == stored.document[:, None]
  readable &= (stored.block[None] < block[:, None])[None]
  flat = jax.tree.map(lambda x: x.reshape(b, g * c, *x.shape[3:]), tokens)
  own_key = None
  if aggregate.router in ("context", "shared"):
    own_key = _router.pooled(aggregate, segments.running, segments.count)
    own_key = own_key.reshape(b, g * c, n, -1)
  index = jnp.repeat(segments.index, c, axis=1)
  logits, own_logit = _router.route(
    aggregate,
    flat,
    stored.keys,
    own_key,
    jnp.broadcast_to(
      stored.index[:, None], (b, g * c, stored.index.shape[1])
    ),
    index,
  )
  readable = jnp.repeat(readable, c, axis=1)[:, :, None]
  readable = jnp.broadcast_to(readable, (b, g * c, n, readable.shape[-1]))
  weights, own = aggregate.weights(logits, own_logit, readable)
  return (
    weights.reshape(b, g, c, n, -1),
    own.reshape(b, g, c, n),
  )


def _read_stored(cached, params, q, stored, weights):
  b, g, c, n, k = q.shape
  if weights.shape[-1] == 0:
    return 0.0
  y = cached.memory.read_many(
    params,
    stored.memories,
    q.reshape(b, g * c, n, k),
    weights.reshape(b, g * c, n, -1),
  )
  return y.reshape(b, g, c, n, -1)


def _soup(cached, params, layout, tokens, start, stored, weights, own):
  memory = cached.memory
  tokens = memory_tokens(memory, tokens, layout.valid)

  def segment(start, tokens, weights, own):
    return memory.scan_soup(
      params, start, tokens, stored.memories, weights, own
    )[0]

  return jax.vmap(segment, in_axes=1, out_axes=1)(start, tokens, weights, own)


def _fold(tree):
  return jax.tree.map(lambda x: rearrange(x, "b g ... -> (b g) ..."), tree)


def _unfold(tree, g):
  return jax.tree.map(
    lambda x: rearrange(x, "(b g) ... -> b g ...", g=g), tree
  )
