"""Tokens of a block share what the first of them selects.

Blocks of tokens begin anew with every segment, so that all tokens of one can
read the same memories, and no choice outlives its segment. What the state of a
cache carries is the numbers of the segments that its running block selected.
"""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Int
from memcache_jax.caching._state import CacheState


def share_places(block, choose, inputs, state, segments):
  """Choices [b g c n r] of tokens that lie by their position in a segment.

  Args:
    block: tokens of a block.
    choose: makes choices of inputs.
    inputs: arrays [b g c ...], or [b g 1 ...] where all tokens have the same.
    state: of the cache before the call, or None.
    segments: facts about those of the call.
  """
  c = segments.count.shape[2]
  firsts = [x if x.shape[2] == 1 else x[:, :, ::block] for x in inputs]
  chosen = jnp.repeat(choose(*firsts), block, axis=2)[:, :, :c]
  if state is None:
    return chosen
  # The block that was open before the call began in it.
  first = jnp.arange(c)[None] // block * block
  old = (first < state.position[:, None]) & (segments.document[:, :1] == 0)
  before = _slots(state, chosen.shape[-1])[:, None]
  before = jnp.where(old[..., None, None], before, chosen[:, 0])
  return chosen.at[:, 0].set(before)


def share_in_order(block, chosen, state, count, mask):
  """Choices [b t n r] of tokens of one segment, some of which may be masked.

  Args:
    block: tokens of a block.
    chosen: by each token alone.
    state: of the cache before the call.
    count: tokens of the segment up to each.
    mask: tokens that exist.
  """
  place = jnp.arange(count.shape[1])[None]
  first = mask & ((count - 1) % block == 0)
  first = jax.lax.cummax(jnp.where(first, place, -1), axis=1)
  index = jnp.maximum(first, 0)[..., None, None]
  shared = jnp.take_along_axis(chosen, index, axis=1)
  before = _slots(state, chosen.shape[-1])[:, None]
  return jnp.where((first < 0)[..., None, None], before, shared)


def numbers(
  chosen: Int[Array, "b n r"], index: Int[Array, "b s"], top_k: int
) -> Int[Array, "b n top_k"]:
  """Numbers of the segments at some places of stored memories.

  Args:
    chosen: the places, -1 for none.
    index: numbers of the segments of all places.
    top_k: most that a block selects.
  """
  slots = index.shape[1]
  # No gather, which heads spread over devices would be in the way of.
  found = chosen[..., None] == jnp.arange(slots).reshape(1, 1, 1, -1)
  taken = jnp.where(found, index[:, None, None], -1)
  taken = jnp.max(taken, axis=-1, initial=-1)
  missing = top_k - taken.shape[-1]
  return jnp.pad(taken, ((0, 0), (0, 0), (0, missing)), constant_values=-1)


def carry(block: int, state: CacheState) -> CacheState:
  """Forgets choices of blocks that are complete."""
  if state.chosen is None:
    return state
  goes_on = (state.position % block > 0)[:, None, None]
  return state._replace(chosen=jnp.where(goes_on, state.chosen, -1))


def _slots(state, count) -> Int[Array, "b n r"]:
  """Places in the cache of what the running block selected, `count` each.

  What it selected comes first, and there are at least so many places.
  """
  slots = state.index.shape[1]
  chosen, index = state.chosen[..., :count, None], state.index[:, None, None]
  found = (chosen == index) & (index >= 0)
  slot = jnp.where(found, jnp.arange(slots).reshape(1, 1, 1, -1), -1)
  return jnp.max(slot, axis=-1, initial=-1)
