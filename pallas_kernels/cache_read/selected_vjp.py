"""Reads of a few selected states per token, on a TPU: gradients."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import column, like
from . import selected_rows as rows_of
from .config import SelectedConfig
from .selected import (
  LANES,
  SUBLANES,
  Reader,
  Tiles,
  compiler_params,
  head_spec,
  in_main_memory,
  of_head,
  of_tiles,
  operand_specs,
  operands,
  shared_spec,
)
from .selected_states import Tree, Walk, ring_scratch


def bwd(
  reader: Reader,
  words: Sequence[jax.Array],
  stored: Tree,
  shared: Tree,
  tiles: Tiles,
  *,
  config: SelectedConfig,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, Tree, Tree, jax.Array]:
  """Gradients of queries, states and gates.

  Args:
    reader: as in the forward pass.
    words: queries and gradients of the reads, of one dtype, by
      `selected_rows.encode` [b n t lanes].
    stored: as in the forward pass.
    shared: as in the forward pass.
    tiles: as in the forward pass.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    Those of queries [b n t k], in their dtype; for each block of tokens, of
    what is stored [b s n x y] and shared [b n 1 x]; and of the gates at their
    places [b n c lanes].
  """
  b, n, t, _ = words[0].shape
  k = reader.widths[0]
  of_blocks = lambda x: like(words[0], b, *x.shape[1:])
  d_stored, d_shared = jax.tree.map(of_blocks, (stored, shared))
  # States that no tile reads keep what is there before.
  zeros = jax.tree.map(jnp.zeros_like, d_stored)
  arrays = operands(words, stored, shared, tiles)
  first, leaves = len(jax.tree.leaves(arrays)), len(jax.tree.leaves(zeros))
  places = tiles.rows.shape[2] * config.tile + SUBLANES
  return pl.pallas_call(
    functools.partial(_bwd_kernel, reader=reader, config=config),
    name=f"{reader.name}_bwd",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(b, n),
      in_specs=[
        *operand_specs(words, stored, shared, tiles),
        jax.tree.map(in_main_memory, zeros),
      ],
      out_specs=(
        head_spec(t, k),
        jax.tree.map(in_main_memory, d_stored),
        jax.tree.map(functools.partial(shared_spec, b), d_shared),
        head_spec(*tiles.weights.shape[2:]),
      ),
      scratch_shapes=[
        pltpu.SMEM(tiles.place.shape[2:], jnp.int32),
        rows_of.scratch(places, [x.shape[3] for x in words], jnp.uint32),
        rows_of.scratch(places, rows_of.parts(k), jnp.float32),
        rows_of.scratch(
          config.tokens_per_column, rows_of.parts(k), jnp.float32
        ),
        ring_scratch(stored, config.ring),
        ring_scratch(d_stored, 2 * config.tiles_per_step),
      ],
    ),
    out_shape=(
      like(words[0], b, n, t, k, dtype=reader.dtype),
      d_stored,
      d_shared,
      like(words[0], *tiles.weights.shape),
    ),
    input_output_aliases={first + i: 1 + i for i in range(leaves)},
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*arrays, zeros)


def _bwd_kernel(*refs, reader, config):
  state, used, rows, place, weights, words, stored, shared, _, *refs = refs
  d_q, d_stored, d_shared, d_weights, *refs = refs
  table, at_places, backs, sums, ring, d_ring = refs
  c, in_use, rows = config.tile, of_tiles(used)(0), of_tiles(rows)
  d_state = of_head(d_stored)
  walk = Walk(
    *(in_use, of_tiles(state), of_head(stored), ring, config.tiles_per_step)
  )
  ahead = walk.begin()
  pltpu.sync_copy(place.at[pl.program_id(0), pl.program_id(1)], table)
  rows_of.spread(words, at_places, table, config.tokens_per_column)
  jax.tree.map(_clear, (d_weights, d_shared))

  def wait(number):
    for copy in d_ring.write_back(number, d_state(0)):
      copy.wait()

  def pull(tile):
    here = pl.ds(pl.multiple_of(tile.index * c, SUBLANES), c)
    decoded = rows_of.decode(
      [x[here] for x in at_places], reader.dtype, *reader.widths
    )
    full = jnp.where(tile.index < in_use, rows(tile.index), 0)
    query, d_read = (_used(x, full) for x in decoded)
    gate = functools.partial(column, weights, tile.index)
    return reader.pull(ring.at(tile.number), shared, query, gate, d_read)

  def pull_tiles(tiles):
    for tile in tiles:
      # What had its place in the ring before.
      pl.when(tile.is_first & (tile.number >= d_ring.depth))(
        functools.partial(wait, tile.number)
      )
    # All of them before anything is stored, which they would wait for.
    pulled = [pull(tile) for tile in tiles]
    for tile, pulled_tile in zip(tiles, pulled, strict=True):
      back, d_gate, of_state, of_shared = pulled_tile
      rows_of.put(back, backs, tile.index * c)
      _put_column(d_gate, d_weights, tile.index)
      add = functools.partial(_add, tile.is_first)
      jax.tree.map(add, d_ring.at(tile.number), of_state)
      jax.tree.map(functools.partial(_add, False), d_shared, of_shared)
    for tile in tiles:
      read, after = walk.state(tile.index), tile.index + 1

      @pl.when((after == in_use) | (walk.state(after) != read))
      def _(tile=tile, read=read):
        for copy in d_ring.write_back(tile.number, d_state(read)):
          copy.start()

  count = walk.finish(ahead, pull_tiles)
  pl.loop(jnp.maximum(count - d_ring.depth, 0), count)(wait)
  rows_of.zero_last(backs)
  rows_of.combine(backs, table, sums, d_q)


def _clear(ref):
  ref[...] = jnp.zeros_like(ref)


def _add(is_first, ref, value):
  ref[...] = jnp.where(is_first, 0.0, ref[...]) + value


def _used(x, rows):
  """Zeros at places that are not in use, of which sums must know nothing."""
  place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
  return jnp.where(place < rows, x, 0.0)


def _put_column(value, ref, index):
  """Stores [c 1] as one of the columns of [c lanes]."""
  first = pl.multiple_of(jnp.bitwise_and(index, ~(LANES - 1)), LANES)
  block = ref.at[:, pl.ds(first, LANES)]
  lane = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1)
  here = lane == jnp.bitwise_and(index, LANES - 1)
  block[...] = jnp.where(here, value, block[...])
