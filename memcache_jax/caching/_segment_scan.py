"""Many tokens of a cached memory: all segments of a call together."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from memcache_jax import numerics, sharding, token_layout
from memcache_jax.caching import (
  _layout,
  _levels,
  _next_state,
  _one_pass,
  _router,
  _sparse_read,
)
from memcache_jax.caching._next_state import CallSegments, Written
from memcache_jax.caching._one_segment import memory_tokens
from memcache_jax.caching._segments import block_level
from memcache_jax.caching._weights import (
  bands,
  last_choice,
  selects,
  stored_memories,
  weigh,
)
from memcache_jax.memories._base import HeadShape, Tokens


def run(cached, params, state, tokens):
  """Writes and reads many tokens; returns y, state and weights."""
  layout = _layout.lay_out(tokens, state, cached.segments)
  inner = Tokens(
    tokens.q, tokens.k, tokens.v, dict(tokens.gates), seeds=tokens.seeds
  )
  inner = layout.spread(inner)
  segments = describe(cached, state, layout, inner.k)
  carried = 0 if state is None else state.index.shape[1]
  run_segments = _in_two_passes
  if _one_pass.takes(cached, inner, carried):
    run_segments = _one_pass.run
  y, weights, own, written = run_segments(
    cached, params, state, layout, inner, segments
  )
  slots = carried
  if state is None:
    slots = cached.capacity(tokens.q.shape[1])
  lost = _router.beyond(cached, segments.index, slots)
  y = jnp.where(lost[:, :, None, None, None], jnp.nan, y)
  y = layout.collect(y.astype(tokens.v.dtype))
  state = _next_state.advance(
    cached, params, state, tokens, layout, segments, written
  )
  weights = jnp.concatenate([weights, own[..., None]], axis=-1)
  return y, state, layout.collect(weights)


def _in_two_passes(cached, params, state, layout, tokens, segments):
  """Writes all segments, then reads them; returns what `_one_pass.run` does."""
  y, start, ends, online = write(cached, params, state, layout, tokens)
  y = checkpoint_name(y, "reads")
  written = _finish(
    cached, params, state, layout, tokens, segments, ends, online
  )
  written = _next_state.keep_ends(written)
  stored = stored_memories(state, written, segments)
  weighed = weigh(cached, state, stored, segments, tokens)
  chosen = last_choice(cached, layout, segments, stored, weighed.selection)
  written = written._replace(chosen=chosen)
  y = read(cached, params, layout, tokens, stored, weighed, y, start)
  return y, weighed.weights, weighed.own, written


def read(cached, params, layout, tokens, stored, weighed, y, start):
  """Reads [b g c n v] of the stored memories and the online ones, combined."""
  weights, own, selection = weighed
  if selects(cached.aggregate, stored.index.shape[1]):
    y = numerics.scale_rows(y.astype(jnp.float32), own)
    return y + _read_selected(cached, params, stored, tokens, selection)
  carried = stored.index.shape[1] - y.shape[1] + 1
  parts = []
  for first, last in bands(y.shape[1]):
    slots = carried + last - 1
    band = jax.tree.map(
      lambda x, first=first, last=last: x[:, first:last],
      (y, start, tokens, layout.valid, own, weights[..., :slots]),
    )
    memories = jax.tree.map(lambda x, s=slots: x[:, :s], stored.memories)
    parts.append(_read(cached, params, memories, *band))
  return jnp.concatenate(parts, axis=1)


def describe(cached, state, layout, k) -> CallSegments:
  """Facts about the segments of a call, of keys [b g c n k]."""
  b, g, c, _, _ = k.shape
  k = k.astype(jnp.float32)
  # A matmul with a triangle of ones: faster than a cumulative sum, forwards
  # and backwards.
  causal = jnp.tril(jnp.ones((c, c), jnp.float32))
  running = jnp.einsum("ce,bgenk->bgcnk", causal, k, precision="highest")
  added = running[:, :, -1]
  if layout.valid is None:
    count = jnp.broadcast_to(jnp.arange(1, c + 1)[None, None], (b, g, c))
  else:
    count = jnp.cumsum(layout.valid, axis=2, dtype=jnp.int32)
  begins = count[:, :, 0] > 0  # only block 0 can go on with earlier tokens
  fresh = layout.fresh
  if fresh is None:
    fresh = jnp.zeros((b, g), bool)
  index, document = number(fresh)
  if state is not None:
    old = document == 0
    index = index + jnp.where(old, state.count[:, None], 0)
    # A document start empties the open segment, if it was not empty already.
    goes_on = old[:, 0]
    running = running.at[:, 0].add(
      jnp.where(goes_on[:, None, None], state.pool, 0.0)[:, None]
    )
    count = count.at[:, 0].add(jnp.where(goes_on, state.position, 0)[:, None])
  complete = count[:, :, -1] == c
  if layout.ended is not None:
    complete |= layout.ended
  return CallSegments(
    count,
    added,
    running[:, :, -1],
    running,
    index,
    document,
    begins,
    complete,
  )


def number(fresh):
  """Index in its document, and document, of segments [b g] of a call."""
  document = jnp.cumsum(fresh, axis=1, dtype=jnp.int32)
  block = jnp.arange(fresh.shape[1], dtype=jnp.int32)[None]
  first = jax.lax.cummax(jnp.where(fresh, block, 0), axis=1)
  return block - first, document


def write(cached, params, state, layout, tokens):
  """Online reads [b g c n v], start and end states [b g ...], last state.

  Start states are None where every segment starts a new sequence.
  """
  memory = cached.memory
  tokens = memory_tokens(memory, tokens, layout.valid)
  b, g = tokens.q.shape[:2]
  initial = memory.init_state(params, _shape(tokens), b)
  initial = sharding.rows_like(initial, tokens.q)
  first = initial if state is None else state.online
  if cached.write_mode == "independent":
    return _write_independent(memory, params, state, layout, tokens, initial)

  def segment(carry, inputs):
    tokens, fresh = inputs
    carry = token_layout.select_rows(fresh, initial, carry)
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
  start = None  # every segment is a new sequence, which memories do fastest
  if state is not None:
    first = state.online
    if layout.fresh is not None:
      first = token_layout.select_rows(layout.fresh[:, 0], initial, first)
    start = jax.tree.map(
      lambda x, y: (
        jnp.broadcast_to(x[:, None], (b, g, *x.shape[1:])).at[:, 0].set(y)
      ),
      initial,
      first,
    )
  y, end = memory.scan(params, _fold(start), _fold(tokens))
  ends = _unfold(memory.snapshot(end), g)
  end = _unfold(end, g)
  if isinstance(layout.last, int):
    online = jax.tree.map(lambda x: x[:, layout.last], end)
  else:
    online = _next_state.take_block(end, layout.last)
  return _unfold(y, g), start, ends, online


def _finish(cached, params, state, layout, tokens, segments, ends, online):
  """What is cached after each segment: its memory, or that of a block."""
  memory = cached.memory
  total, count = segments.total, segments.count[:, :, -1]
  levels = None
  if state is not None:
    levels = state.levels
  elif layout.tokens >= 2 * layout.length:
    slots = cached.capacity(layout.tokens)
    initial = cached.empty_state(params, _shape(tokens), total.shape[0], slots)
    levels = sharding.rows_like(initial, tokens.q).levels
  if levels is not None:
    initial = memory.init_state(params, _shape(tokens), total.shape[0])
    initial = sharding.rows_like(initial, tokens.q)
    inner = memory_tokens(memory, tokens, layout.valid)
    ends, total, levels = _levels.scan(
      memory, params, levels, inner, segments, ends, initial
    )
    count = count << block_level(segments.index)
  keys = _router.pooled(cached.aggregate, total, count)
  return Written(ends, keys, online, levels)


def _shape(tokens):
  n, k = tokens.q.shape[-2:]
  return HeadShape(n, k, tokens.v.shape[-1])


def _read(cached, params, memories, y, start, tokens, valid, own, weights):
  """Reads [b g c n v] of the stored memories and the online one, combined."""
  memory, aggregate = cached.memory, cached.aggregate
  soup = aggregate.mixes_parameters and not memory.reads_linearly
  axis = None  # the memories are those of all segments
  alike = aggregate.router == "none" and weights.shape[-1] > 1
  if alike and (soup or memory.reads_linearly):
    # All tokens of a segment mix alike: it needs one mix, and one read of it.
    mix = lambda x: _mix(weights[:, :, 0, 0], x)[:, :, None]
    memories, axis = jax.tree.map(mix, memories), 1
    weights = jnp.ones_like(weights[..., :1])
  if soup:
    tokens = memory_tokens(memory, tokens, valid)

    def read_soup(start, tokens, weights, own, memories):
      return memory.scan_soup(params, start, tokens, memories, weights, own)[0]

    read = jax.vmap(read_soup, in_axes=(1, 1, 1, 1, axis), out_axes=1)
    return read(start, tokens, weights, own, memories)
  y = own[..., None] * y.astype(jnp.float32)
  if weights.shape[-1] == 0:
    return y
  if axis == 1:
    q, weights, memories = _fold((tokens.q, weights, memories))
    read = memory.read_many(params, memories, q, weights)
    return y + _unfold(read, y.shape[1])
  q, weights = (
    rearrange(x, "b g c ... -> b (g c) ...") for x in (tokens.q, weights)
  )
  read = memory.read_many(params, memories, q, weights)
  return y + read.reshape(y.shape)


def _read_selected(cached, params, stored, tokens, selection):
  q, selection = jax.tree.map(
    lambda x: rearrange(x, "b g c ... -> b (g c) ..."), (tokens.q, selection)
  )
  y = _sparse_read.read_selected(
    cached.memory, params, stored.memories, q, selection
  )
  return y.reshape(*tokens.q.shape[:3], *y.shape[2:])


def _mix(weights, memories):
  """[b g s] and [b s ...] -> [b g ...]."""
  weights = sharding.rows_like(weights, memories)
  return jnp.einsum("bgs,bs...->bg...", weights, memories, precision="highest")


def _fold(tree):
  return jax.tree.map(lambda x: rearrange(x, "b g ... -> (b g) ..."), tree)


def _unfold(tree, g):
  return jax.tree.map(lambda x: rearrange(x, "(b g) ... -> b g ...", g=g), tree)
