"""Writers of blocks of several segments, for logarithmic segments.

Level j = 1, 2, ... writes blocks of 2^j segments: its writer starts anew where
2^j divides the number of the segment. Level 0 is the online memory itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Float, State
from memcache_jax.caching._segments import block_level


class Levels(NamedTuple):
  """What the writers of all levels hold.

  Attributes:
    states: of the memory, leaves [b j ...]; None where blocks are snapshots of
      one running memory.
    pools: sums of the keys of each writer's block so far.
  """

  states: State | None
  pools: Float[Array, "b j n k"]


def empty(
  memory_state: State,
  pool: Float[Array, "b n k"],
  levels: int,
  write_mode: str,
) -> Levels | None:
  """Writers before the first token; None without levels."""
  if levels == 0:
    return None
  repeat = lambda x: jnp.repeat(x[:, None], levels, axis=1)
  states = None
  if write_mode == "independent":
    states = jax.tree.map(repeat, memory_state)
  return Levels(states, repeat(pool))


def write(memory, params, levels, tokens, index, begins, total, initial):
  """Lets every writer read the tokens of one segment of each row.

  Args:
    memory: the memory inside.
    params: its parameters.
    levels: the writers.
    tokens: [b c ...] of one segment.
    index: number of the segment in its document [b].
    begins: whether these are the first tokens of the segment [b].
    total: sum of their keys [b n k].
    initial: state of an empty memory.
  """
  count = levels.pools.shape[1]
  size = 2 ** jnp.arange(1, count + 1)[None]
  anew = begins[:, None] & (index[:, None] % size == 0)
  pools = jnp.where(anew[..., None, None], 0.0, levels.pools) + total[:, None]
  if levels.states is None:
    return Levels(None, pools)

  def one(state, anew):
    state = token_layout.select_rows(anew, initial, state)
    return memory.scan(params, state, tokens)[1]

  states = jax.vmap(one, in_axes=1, out_axes=1)(levels.states, anew)
  return Levels(states, pools)


def finished(memory, levels, index, snapshot, total):
  """The block that ends with a segment: its memory and the sum of its keys.

  Args:
    memory: the memory inside.
    levels: the writers after the segment.
    index: number of the segment [b].
    snapshot: of the online memory after it, leaves [b ...].
    total: sum of the keys of the segment [b n k].
  """
  level = block_level(index)[:, None]

  def pick(first, others):
    both = jnp.concatenate([first[:, None], others], axis=1)
    return token_layout.take_tokens(both, level)[:, 0]

  if levels.states is not None:
    others = jax.vmap(memory.snapshot, in_axes=1, out_axes=1)(levels.states)
    snapshot = jax.tree.map(pick, snapshot, others)
  return snapshot, pick(total, levels.pools)


def scan(memory, params, levels, tokens, segments, ends, initial):
  """Runs the writers over all segments of a call.

  Args:
    memory: the memory inside.
    params: its parameters.
    levels: the writers before the call.
    tokens: [b g c ...].
    segments: facts about them.
    ends: snapshots of the online memory at their ends [b g ...].
    initial: state of an empty memory.

  Returns:
    Snapshots [b g ...] and key sums [b g n k] of the blocks that end with each
    segment, and the writers after the call.
  """

  def segment(levels, inputs):
    tokens, index, begins, added, total, end = inputs
    levels = write(
      memory, params, levels, tokens, index, begins, added, initial
    )
    return levels, finished(memory, levels, index, end, total)

  inputs = (
    tokens,
    segments.index,
    segments.begins,
    segments.added,
    segments.total,
    ends,
  )
  inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
  levels, outputs = jax.lax.scan(segment, levels, inputs)
  snapshots, totals = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
  return snapshots, totals, levels
