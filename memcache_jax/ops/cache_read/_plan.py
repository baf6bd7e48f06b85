"""Pairs of a token and a memory that it selected, sorted by memory.

They are cut into tiles of one memory each, so that every tile is one read of
many queries. The number of tiles is known beforehand: a memory leaves at most
one of them unfilled.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Int

# Queries of a tile: more fill a matrix unit better, and leave more unfilled.
_SMALLEST_TILE, _LARGEST_TILE = 8, 128


class Plan(NamedTuple):
  """Where pairs go; m places in p tiles, of which some stay empty.

  Tiles of one memory follow each other; empty tiles come last.
  """

  memory: Int[Array, "b p n"]  # that each tile reads
  pair: Int[Array, "b n m"]  # that stands at a place; -1: empty
  place: Int[Array, "b n j"]  # of each pair; -1: nowhere


def tile_size(pairs: int, slots: int) -> int:
  """About as many tiles as there are memories, of a size that pays."""
  if pairs <= slots:
    return 1
  size = _SMALLEST_TILE
  while size < _LARGEST_TILE and 4 * size * slots <= pairs:
    size *= 2
  return size


def make_plan(index: Int[Array, "b t n r"], slots: int, tile: int) -> Plan:
  """Sorts pairs by memory.

  Args:
    index: the memories that each token selected; -1 for none.
    slots: memories there are.
    tile: places of a tile.
  """
  b, t, n, r = index.shape
  pairs = t * r
  tiles = pairs // tile + min(slots, pairs)
  group = jnp.transpose(index, (0, 2, 1, 3)).reshape(b, n, pairs)
  group = jnp.where(group < 0, slots, group)

  marks = jnp.arange(slots + 1, dtype=group.dtype)

  def head(group):
    # A mark before the pairs of each memory: where it is after sorting says
    # where they begin, and nothing needs to be searched for.
    order = _stable_order(jnp.concatenate([marks, group]), slots)
    rank = _stable_order(order, pairs + slots)
    first, rank = rank[: slots + 1] + 1, rank[slots + 1 :]
    count = first[1:] - first[:-1] - 1
    needed = -(-count // tile)
    after = jnp.cumsum(needed)
    number = jnp.arange(tiles, dtype=jnp.int32)
    # Comparing all numbers: of so few, it takes less than a loop.
    find = functools.partial(jnp.searchsorted, method="compare_all")
    memory = find(after, number, side="right").astype(jnp.int32)
    memory = jnp.minimum(memory, slots - 1)
    # Place c of tile p holds the pair number (p - tiles before) tile + c of
    # those that selected its memory.
    before = after - needed
    offset = (number - before[memory])[:, None] * tile + jnp.arange(tile)[None]
    filled = offset < count[memory][:, None]
    source = jnp.clip(first[memory][:, None] + offset, 0, pairs + slots)
    pair = jnp.where(filled, order[source] - slots - 1, -1).reshape(-1)
    shift = before * tile - first[:-1]
    place = rank + shift[jnp.minimum(group, slots - 1)]
    return memory, pair, jnp.where(group < slots, place, -1)

  memory, pair, place = jax.vmap(jax.vmap(head))(group)
  return Plan(jnp.swapaxes(memory, 1, 2), pair, place)


def _stable_order(group, slots):
  """`argsort` of numbers up to `slots`, in one word each where they fit.

  Sorting single numbers takes a fifth of the time of sorting pairs on a CPU.
  """
  pairs = group.shape[0]
  if (slots + 1) * pairs > jnp.iinfo(jnp.int32).max:
    return jnp.argsort(group, stable=True).astype(jnp.int32)
  number = jnp.arange(pairs, dtype=jnp.int32)
  return jnp.sort(group.astype(jnp.int32) * pairs + number) % pairs
