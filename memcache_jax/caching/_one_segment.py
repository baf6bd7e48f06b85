"""Tokens of one segment: what a decode step computes, of a single one."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.caching import _blocks, _host, _levels, _router
from memcache_jax.caching._segments import block_level
from memcache_jax.caching._sparse_read import read_selected
from memcache_jax.caching._weights import mix, selects
from memcache_jax.memories._base import Tokens


def run(cached, params, state, tokens):
  """Writes and reads tokens; returns y, state and weights.

  All tokens of a row must fit into its open segment, and a document may start
  only at the first one.
  """
  b, t = tokens.q.shape[:2]
  slots = state.index.shape[1]
  mask = tokens.mask
  if mask is None:
    mask = jnp.ones((b, t), bool)
  else:  # whatever a masked token holds, even nan, must not reach a product
    q, k, v, gates = token_layout.zero_masked(
      (tokens.q, tokens.k, tokens.v, dict(tokens.gates)), mask
    )
    tokens = replace(tokens, q=q, k=k, v=v, gates=gates)
  if tokens.starts is not None:
    empty = cached.empty_state(params, tokens.head_shape, b, slots)
    state = token_layout.select_rows((tokens.starts & mask)[:, 0], empty, state)
  k = tokens.k.astype(jnp.float32)
  running = state.pool[:, None] + jnp.cumsum(k, axis=1)
  count = state.position[:, None] + jnp.cumsum(mask, axis=1, dtype=jnp.int32)
  own_key = _router.pooled(cached.aggregate, running, count)

  readable = (state.index >= 0)[:, None, None]
  relevance = _router.route(
    cached.aggregate,
    tokens,
    state.keys,
    own_key,
    state.index,
    jnp.broadcast_to(state.count[:, None], (b, t)),
  )
  readable = jnp.broadcast_to(readable, (*tokens.q.shape[:3], slots))

  def share(choose, *inputs):
    return _blocks.share_in_order(
      cached.aggregate.block, choose(*inputs), state, count, mask
    )

  weights, own, selection = mix(cached.aggregate, relevance, readable, share)
  y, online = _read(cached, params, state, tokens, weights, own, selection)
  lost = _router.beyond(cached, state.count, slots)
  y = jnp.where(lost[:, None, None, None], jnp.nan, y)
  y = jnp.where(mask[..., None, None], y, 0.0)

  after = state._replace(
    online=online,
    pool=running[:, -1],
    position=count[:, -1],
    levels=_write_levels(cached, params, state, tokens, mask),
    use=_count_use(state, weights, mask),
  )
  if selection is not None and state.chosen is not None:
    chosen = selection.index[:, -1]
    top_k = state.chosen.shape[-1]
    after = after._replace(chosen=_blocks.numbers(chosen, state.index, top_k))
  done = after.position == cached.segments.length
  if tokens.segment_ends is not None:
    known = state.count < cached.segments.max_flagged
    done |= (tokens.segment_ends & mask)[:, 0] & known
  done &= ~_impossible(y)
  state = _cache(cached, params, after, done, tokens.head_shape)
  state = _blocks.carry(cached.aggregate.block, state)
  weights = jnp.concatenate([weights, own[..., None]], axis=-1)
  return y.astype(tokens.v.dtype), state, weights


def _read(cached, params, state, tokens, weights, own, selection):
  memory = cached.memory
  inner = memory_tokens(memory, tokens, tokens.mask)
  memories = state.memories
  selected = selects(cached.aggregate, weights.shape[-1])
  if not selected:
    memories = _host.to_device(memories)
  if cached.aggregate.mixes_parameters and not memory.reads_linearly:
    return memory.scan_soup(params, state.online, inner, memories, weights, own)
  y, online = memory.scan(params, state.online, inner)
  y = own[..., None] * y.astype(jnp.float32)
  if selected:
    y += read_selected(memory, params, memories, tokens.q, selection)
  elif weights.shape[-1]:
    y += memory.read_many(params, memories, tokens.q, weights)
  return y, online


def _impossible(y):
  """False for every row, as the compiler cannot know before y is.

  A donated cache is overwritten where it lies only if all reads of it are known
  to come first; else XLA copies the whole cache. `optimization_barrier`
  does not tell it: barriers are gone when it looks for copies.
  """
  return jnp.max(y, axis=(1, 2, 3)) < jnp.min(y, axis=(1, 2, 3))


def memory_tokens(memory, tokens, mask):
  """The tokens with only the gates of the memory inside, and no starts."""
  gates = {name: tokens.gates[name] for name in memory.gates()}
  return Tokens(tokens.q, tokens.k, tokens.v, gates, mask)


def _count_use(state, weights, mask):
  """How much each memory has been read, these tokens included."""
  if state.use is None:
    return None
  weights = jnp.where(mask[..., None], jnp.mean(weights, axis=2), 0.0)
  return state.use + jax.lax.stop_gradient(jnp.sum(weights, axis=1))


def _write_levels(cached, params, state, tokens, mask):
  """The writers of longer blocks, after the tokens."""
  if state.levels is None:
    return None
  memory, b = cached.memory, tokens.q.shape[0]
  return _levels.write(
    memory,
    params,
    state.levels,
    memory_tokens(memory, tokens, mask),
    state.count,
    (state.position == 0) & jnp.any(mask, axis=1),
    jnp.sum(tokens.k.astype(jnp.float32), axis=1),
    memory.init_state(params, tokens.head_shape, b),
  )


def _cache(cached, params, state, done, shape):
  """Moves the online memory of finished segments into the cache."""
  b, slots = state.index.shape
  memory = cached.memory
  if slots == 0:  # no room; `beyond` sees to what comes after
    return _open(cached, params, state, done, shape)
  snapshot, total = memory.snapshot(state.online), state.pool
  count = state.position
  if state.levels is not None:
    snapshot, total = _levels.finished(
      memory, state.levels, state.count, snapshot, total
    )
    count = count << block_level(state.count)
  keys = _router.pooled(cached.aggregate, total, count)
  # Blocks that the new one replaces make room for it. Without longer blocks
  # there are none, and the cache is not touched.
  after = state.count + done.astype(jnp.int32)
  if cached.policy is not None:
    make_room = lambda x: cached.policy.make_room(cached, x, done)
    # Moves memories: not at every token.
    state = jax.lax.cond(jnp.any(done), make_room, lambda x: x, state)
  keep = cached.readable(after[:, None], state.index)
  if state.levels is not None:
    memories, keys_before = token_layout.zero_masked(
      (state.memories, state.keys), keep
    )
    state = state._replace(
      memories=memories,
      keys=keys_before,
      index=jnp.where(keep, state.index, -1),
    )
  slot = jnp.sum(keep, axis=1, dtype=jnp.int32)
  slot = jnp.where(done, slot, slots)[:, None]  # out of range: dropped

  def put(stored, new):
    put_rows = token_layout.put_rows
    return _host.where_it_lies(put_rows, stored, slot, new[:, None])

  state = state._replace(
    memories=jax.tree.map(put, state.memories, snapshot),
    keys=put(state.keys, keys),
    index=put(state.index, state.count),
  )
  return _open(cached, params, state, done, shape)


def _open(cached, params, state, done, shape):
  """Opens a new segment in the rows that finished one."""
  online = state.online
  if cached.write_mode == "independent":
    initial = cached.memory.init_state(params, shape, done.shape[0])
    online = token_layout.select_rows(done, initial, online)
  return state._replace(
    online=online,
    pool=jnp.where(done[:, None, None], 0.0, state.pool),
    position=jnp.where(done, 0, state.position),
    count=state.count + done.astype(jnp.int32),
  )
