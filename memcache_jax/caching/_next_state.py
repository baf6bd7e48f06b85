"""What is left of a call: the open segment, and the cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float, Int, State
from memcache_jax.caching import _blocks
from memcache_jax.caching._levels import Levels
from memcache_jax.caching._state import CacheState, first_kept


class CallSegments(NamedTuple):
  """Facts about the segments of a call; g of them, block 0 was open before."""

  count: Int[Array, "b g c"]  # tokens of the segment up to each place
  added: Float[Array, "b g n k"]  # sum of the keys of this call
  total: Float[Array, "b g n k"]  # sum of the segment's keys
  running: Float[Array, "b g c n k"]  # the same up to each place
  index: Int[Array, "b g"]  # number of the segment in its document
  document: Int[Array, "b g"]  # 0: the one running before the call
  begins: Bool[Array, "b g"]  # its first token is one of this call
  complete: Bool[Array, "b g"]


class Written(NamedTuple):
  """What the segments of a call left behind."""

  memories: State  # cached after each segment, leaves [b g ...]
  keys: Float[Array, "b g n k"]  # pooled over the tokens of that memory
  online: State  # after the last token
  levels: Levels | None
  chosen: Int[Array, "b n r"] | None = None  # by the block of the last token


def keep_ends(written: Written) -> Written:
  """Names what segments left, for policies of `jax.checkpoint`."""
  name = lambda x: checkpoint_name(x, "segment_ends")
  return written._replace(
    memories=jax.tree.map(name, written.memories), keys=name(written.keys)
  )


def advance(cached, params, state, tokens, layout, segments, written):
  """The state after the call."""
  b = tokens.q.shape[0]
  slots = cached.capacity(layout.tokens)
  if state is not None:
    slots = state.index.shape[1]
  last = layout.last
  if isinstance(last, int):
    last = jnp.full((b,), last)
  done = take_block(segments.complete, last)
  document = take_block(segments.document, last)
  count = take_block(segments.index, last) + done.astype(jnp.int32)
  new = (written.memories, written.keys, segments.index)
  keep = segments.complete & (segments.document == document[:, None])
  if state is not None:
    old = (state.memories, state.keys, state.index)
    new = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), old, new)
    old_keep = (state.index >= 0) & (document == 0)[:, None]
    keep = jnp.concatenate([old_keep, keep], axis=1)
  keep &= cached.readable(count[:, None], new[2])
  memories, keys, index = first_kept(new, keep, slots)
  online = written.online
  if cached.write_mode == "independent":
    initial = cached.memory.init_state(params, tokens.head_shape, b)
    online = token_layout.select_rows(done, initial, online)
  running = (~done).astype(jnp.int32)
  pool = take_block(segments.total, last)
  new_state = CacheState(
    online=online,
    pool=jnp.where(done[:, None, None], 0.0, pool),
    position=take_block(segments.count[:, :, -1], last) * running,
    memories=memories,
    keys=keys,
    index=jnp.where(index >= 0, index, -1),
    count=count,
    levels=written.levels,
    chosen=written.chosen,
  )
  new_state = _blocks.carry(cached.aggregate.block, new_state)
  if layout.lost is None:
    return new_state
  return poison(new_state, layout.lost)


def poison(state, rows):
  """Makes the state of rows that did not fit nan."""

  def one(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    flags = rows.reshape((-1,) + (1,) * (x.ndim - 1))
    return jnp.where(flags, jnp.full((), jnp.nan, x.dtype), x)

  return jax.tree.map(one, state)


def take_block(tree, block):
  """[b g ...] -> [b ...], one block per row."""
  taken = token_layout.take_tokens(tree, block[:, None])
  return jax.tree.map(lambda x: x[:, 0], taken)
