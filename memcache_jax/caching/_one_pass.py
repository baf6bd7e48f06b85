"""Segments written and read in one pass, by a memory that can."""

import jax
import jax.numpy as jnp

from memcache_jax.caching import _next_state, _router
from memcache_jax.caching._next_state import Written
from memcache_jax.caching._one_segment import memory_tokens
from memcache_jax.caching._weights import (
  last_choice,
  selects,
  stored_memories,
  weigh,
)


def takes(cached, tokens, carried) -> bool:
  """Whether tokens [b g c ...] are best read while segments are written."""
  if cached.segments.levels(2) or cached.aggregate.router == "none":
    # Longer blocks are written apart; and where all tokens of a segment mix
    # alike, one mix of the memories is read instead.
    return False
  if selects(cached.aggregate, carried + tokens.q.shape[1] - 1):
    return False  # which reads all memories
  return cached.memory.scans_segments(tokens, carried)


def run(cached, params, state, layout, tokens, segments):
  """Reads [b g c n v], weights, own ones, and what the segments left."""
  keys = _router.pooled(
    cached.aggregate, segments.total, segments.count[:, :, -1]
  )
  # Gates depend on keys alone.
  nothing = None if state is None else state._replace(memories=None)
  stored = stored_memories(nothing, Written(None, keys, None, None), segments)
  weights, own, chosen, _ = weigh(cached, state, stored, segments, tokens)
  memory = cached.memory
  y, ends = memory.scan_segments(
    params,
    None if state is None else state.online,
    memory_tokens(memory, tokens, layout.valid),
    None if state is None else state.memories,
    # Nothing of this call reads the end of its last segment.
    jnp.pad(weights, [(0, 0)] * 4 + [(0, 1)]),
    own,
    layout.fresh,
    cached.write_mode,
  )
  if isinstance(layout.last, int):
    online = jax.tree.map(lambda x: x[:, layout.last], ends)
  else:
    online = _next_state.take_block(ends, layout.last)
  written = Written(
    memories=jax.vmap(memory.snapshot, 1, 1)(ends),
    keys=keys,
    online=online,
    levels=None,
    chosen=last_choice(cached, layout, segments, stored, chosen),
  )
  return y, weights, own, written
