"""States of consecutive tiles: fetched while those before are used."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Tree = Any
Index = jax.Array | int


class Tile(NamedTuple):
  """One of the tiles of a step.

  Attributes:
    index: its number; from that of tiles in use on, it has no rows.
    number: of its state among those that tiles read, in their order.
    is_first: whether no tile before reads the same state.
  """

  index: jax.Array
  number: jax.Array
  is_first: jax.Array


class Ring(NamedTuple):
  """Where states of the last few numbers are.

  Attributes:
    buffers: arrays [depth x y] in fast memory; depth is a power of 2.
    semaphores: of copies from or to main memory, one for each place.
  """

  buffers: Tree
  semaphores: Any

  @property
  def depth(self) -> int:
    return self.semaphores.shape[0]

  def at(self, number: jax.Array) -> Tree:
    """References to one state."""
    place = jnp.bitwise_and(number, self.depth - 1)
    return jax.tree.map(lambda x: x.at[place], self.buffers)

  def fetch(self, number, stored: Tree) -> list:
    """Copies from main memory, one for each array."""
    return self._copies(stored, self.at(number), number)

  def write_back(self, number, stored: Tree) -> list:
    """Copies to main memory, likewise."""
    return self._copies(self.at(number), stored, number)

  def _copies(self, sources, targets, number):
    semaphore = self.semaphores.at[jnp.bitwise_and(number, self.depth - 1)]
    copy = lambda x, y: pltpu.make_async_copy(x, y, semaphore)
    return jax.tree.leaves(jax.tree.map(copy, sources, targets))


def ring_scratch(stored: Tree, depth: int) -> Ring:
  """Of arrays [b s n x y]."""
  buffer = lambda x: pltpu.VMEM((depth, *x.shape[3:]), x.dtype)
  return Ring(jax.tree.map(buffer, stored), pltpu.SemaphoreType.DMA((depth,)))


class Walk(NamedTuple):
  """A walk over the tiles of a head, some at a time.

  Attributes:
    used: tiles in use.
    state: that a tile reads; those behind repeat the last one in use.
    stored: references to a state in main memory.
    ring: where states come, before their tiles are visited.
    per_step: tiles that are visited together; of the ring as much is ahead as
      one step leaves.
  """

  used: jax.Array
  state: Callable[[Index], jax.Array]
  stored: Callable[[Index], Tree]
  ring: Ring
  per_step: int

  @property
  def _ahead(self) -> int:
    return self.ring.depth // self.per_step - 1

  def _tiles(self, step, before):
    """Tiles of a step and their states, given the last tile and state."""
    number, last = before
    tiles, states = [], []
    for j in range(self.per_step):
      index = step * self.per_step + j
      current = self.state(index)
      new = current != last
      number, last = number + new.astype(jnp.int32), current
      tiles.append(Tile(index, number, new))
      states.append(current)
    return tiles, states, (number, last)

  def _before(self):
    """Before the first tile; nobody reads anything where none is in use."""
    return jnp.int32(-1), jnp.where(self.used > 0, -1, self.state(0))

  def _fetch(self, step, before):
    tiles, states, before = self._tiles(step, before)
    for tile, state in zip(tiles, states, strict=True):

      @pl.when(tile.is_first)
      def _(tile=tile, state=state):
        for copy in self.ring.fetch(tile.number, self.stored(state)):
          copy.start()

    return before

  def _wait(self, number):
    for copy in self.ring.fetch(number, self.stored(0)):
      copy.wait()

  def begin(self):
    """Fetches the first states; what `finish` takes."""
    return jax.lax.fori_loop(0, self._ahead, self._fetch, self._before())

  def finish(self, ahead, visit: Callable[[list[Tile]], None]) -> jax.Array:
    """Visits tiles, their states in the ring; how many states they read."""

    def step(i, carry):
      before, ahead = carry
      ahead = self._fetch(i + self._ahead, ahead)
      tiles, _, before = self._tiles(i, before)
      for tile in tiles:
        pl.when(tile.is_first)(functools.partial(self._wait, tile.number))

      visit(tiles)
      return before, ahead

    steps = pl.cdiv(self.used, self.per_step)
    (number, _), _ = jax.lax.fori_loop(0, steps, step, (self._before(), ahead))
    return number + 1
