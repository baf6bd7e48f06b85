"""States that stay in main memory: fetched while the ones before are used."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Of the semaphores of a kernel, those that `for_each_streamed` uses.
SEMAPHORES = 6


def for_each_streamed(visit, count, first, sources, ring, semaphores):
  """Visits states of main memory, the next one on its way.

  Args:
    visit: called with a slot and references to what was fetched.
    count: states to visit.
    first: slot of the first one.
    sources: one or two functions from a number below `count` to a reference in
      main memory [k v]. What was fetched from the second is written back after
      the visit.
    ring: fast memory [2 k v] for each source.
    semaphores: `SEMAPHORES` of them.
  """

  def fetch(i):
    place = jnp.bitwise_and(i, 1)
    return [
      pltpu.make_async_copy(
        source(i), buffer.at[place], semaphores.at[2 * j + place]
      )
      for j, (source, buffer) in enumerate(zip(sources, ring, strict=True))
    ]

  def write_back(i):
    place = jnp.bitwise_and(i, 1)
    return pltpu.make_async_copy(
      ring[1].at[place], sources[1](i), semaphores.at[4 + place]
    )

  @pl.when(count > 0)
  def _():
    for copy in fetch(0):
      copy.start()

  @pl.loop(0, count)
  def _(i):
    if len(sources) > 1:
      # The next one comes to where the last one still is on its way from.
      @pl.when(i > 0)
      def _():
        write_back(i - 1).wait()

    @pl.when(i + 1 < count)
    def _():
      for copy in fetch(i + 1):
        copy.start()

    for copy in fetch(i):
      copy.wait()
    place = jnp.bitwise_and(i, 1)
    visit(first + i, *(buffer.at[place] for buffer in ring))
    if len(sources) > 1:
      write_back(i).start()

  if len(sources) > 1:

    @pl.when(count > 0)
    def _():
      write_back(count - 1).wait()
