"""Reads of a few selected states per token, on a TPU.

A pair of a token and a state that it selected has a place in a tile, and all
places of a tile read one state, which is fetched by a table of the tiles. What
belongs to the tokens of a block stays in fast memory: their rows are copied to
their places, tiles are read, and what was read is added up at the tokens, with
nothing in between in main memory. What a state is, and how it is read, is up to
the caller: a matrix, or a network of `mlp_memory`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import column, dot, like
from . import selected_rows as rows_of
from .config import SelectedConfig
from .selected_states import Index, Tree, Walk, ring_scratch

LANES, SUBLANES = rows_of.LANES, rows_of.SUBLANES


class Tiles(NamedTuple):
  """Where pairs have their places: p tiles of c places.

  Attributes:
    state: that each tile reads, in rising order; tiles that are not in use come
      last and repeat the state before, and so do `config.ring` more
      [b n p + ring].
    used: tiles in use [b n].
    rows: places of each tile in use [b n p], the first ones.
    place: of all pairs [b n pairs columns]: a column holds whole tokens,
      `config.tokens_per_column` of them; p c for a pair without a place.
    weights: the gate at each place [b n c lanes] float32, tiles last; 0 where
      it is not in use.
  """

  state: jax.Array
  used: jax.Array
  rows: jax.Array
  place: jax.Array
  weights: jax.Array


class Reader(NamedTuple):
  """How what is stored is read, in fast memory.

  Attributes:
    name: of the kernels.
    widths: of queries and values.
    dtype: of queries.
    read: of the arrays of one state, those that all states share, and queries
      [c k] float32: the reads [c v] float32.
    pull: of the same, then gates and gradients of the reads. Gates come as a
      function of the width over which they are to lie, gradients as [c v]
      float32. Gradients of the queries [c k], the gates [c 1], the state and
      what is shared; float32.
  """

  name: str
  widths: tuple[int, int]
  dtype: Any
  read: Callable[..., jax.Array]
  pull: Callable[..., tuple[jax.Array, jax.Array, Tree, Tree]]


def matrices(k: int, v: int, dtype: Any) -> Reader:
  """q S of matrices [k v], with operands of a type."""

  def read(state, shared, query):
    del shared
    return dot(query.astype(dtype), state[...].astype(dtype))

  def pull(state, shared, query, gate, d_read):
    del shared
    d_read = d_read.astype(dtype)
    back = dot(d_read, state[...].astype(dtype), contract=(1, 1))
    gates = gate(back.shape[1])
    gated = (gates * query).astype(dtype)
    d_gate = jnp.sum(query * back, 1, keepdims=True)
    return gates * back, d_gate, dot(gated, d_read, contract=(0, 0)), {}

  name = "memcache_cache_read_selected"
  return Reader(name, (k, v), dtype, read, pull)


def fwd(
  reader: Reader,
  words: Sequence[jax.Array],
  stored: Tree,
  shared: Tree,
  tiles: Tiles,
  *,
  config: SelectedConfig,
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """Gated reads of all tokens.

  Args:
    reader: how a state is read.
    words: queries, by `selected_rows.encode` [b n t lanes]; t is a multiple of
      `config.tokens_per_column` and of 16.
    stored: arrays [b' s n x y] float32 of the states; b is a multiple of b',
      whose rows are those of as many consecutive blocks of tokens.
    shared: arrays [b' n 1 x] float32 that all states share.
    tiles: see `Tiles`.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [b n t v] float32.
  """
  b, n, t, _ = words[0].shape
  places = tiles.rows.shape[2] * config.tile + SUBLANES
  parts = rows_of.parts(reader.widths[1])
  return pl.pallas_call(
    functools.partial(_fwd_kernel, reader=reader, config=config),
    name=f"{reader.name}_fwd",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(b, n),
      in_specs=operand_specs(words, stored, shared, tiles),
      out_specs=head_spec(t, reader.widths[1]),
      scratch_shapes=[
        pltpu.SMEM(tiles.place.shape[2:], jnp.int32),
        rows_of.scratch(places, [x.shape[3] for x in words], jnp.uint32),
        rows_of.scratch(places, parts, jnp.float32),
        rows_of.scratch(config.tokens_per_column, parts, jnp.float32),
        ring_scratch(stored, config.ring),
      ],
    ),
    out_shape=like(words[0], b, n, t, reader.widths[1]),
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*operands(words, stored, shared, tiles))


def head_spec(*shape: int) -> pl.BlockSpec:
  """All of a head."""
  return pl.BlockSpec(
    (None, None, *shape), lambda b, n, *_: (b, n, *(0 for _ in shape))
  )


def shared_spec(rows: int, x: Any) -> pl.BlockSpec:
  """What all states of a head share, where there are that many rows."""
  blocks = rows // x.shape[0]
  return pl.BlockSpec(
    (None, None, *x.shape[2:]),
    lambda b, n, *_: (jax.lax.div(b, blocks), n, 0, 0),
  )


def in_main_memory(_: Any) -> pl.BlockSpec:
  return pl.BlockSpec(memory_space=pl.ANY)


def operand_specs(words, stored: Tree, shared: Tree, tiles: Tiles) -> list:
  """Place, weights, words, stored, shared."""
  return [
    in_main_memory(tiles.place),
    head_spec(*tiles.weights.shape[2:]),
    [head_spec(*x.shape[2:]) for x in words],
    jax.tree.map(in_main_memory, stored),
    jax.tree.map(functools.partial(shared_spec, words[0].shape[0]), shared),
  ]


def operands(words, stored: Tree, shared: Tree, tiles: Tiles) -> tuple:
  """What the kernels take; tables of tiles take no more than they hold."""
  flat = [x.reshape(-1) for x in (tiles.state, tiles.used, tiles.rows)]
  return *flat, tiles.place, tiles.weights, list(words), stored, shared


def compiler_params(config: SelectedConfig) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel"),
    vmem_limit_bytes=config.vmem_limit_bytes,
    disable_bounds_checks=True,
  )


def of_tiles(table) -> Callable[[Index], jax.Array]:
  """Numbers of the tiles of this head, of a table of all heads."""
  heads = pl.num_programs(0) * pl.num_programs(1)
  head = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
  first = head * (table.shape[0] // heads)
  return lambda i: table[first + i]


def of_head(stored: Tree) -> Callable[[Index], Tree]:
  """References to a state [x y] of the head of this step."""
  b, n = pl.program_id(0), pl.program_id(1)

  def at(state, x):
    return x.at[jax.lax.div(b, pl.num_programs(0) // x.shape[0]), state, n]

  return lambda state: jax.tree.map(functools.partial(at, state), stored)


def _fwd_kernel(*refs, reader, config):
  state, used, _, place, weights, words, stored, shared, y, *refs = refs
  table, queries, reads, sums, ring = refs
  c = config.tile
  walk = Walk(
    *(of_tiles(used)(0), of_tiles(state), of_head(stored)),
    *(ring, config.tiles_per_step),
  )
  ahead = walk.begin()
  pltpu.sync_copy(place.at[pl.program_id(0), pl.program_id(1)], table)
  rows_of.spread(words, queries, table, config.tokens_per_column)

  def read_tiles(tiles):
    # All of them before anything is stored, which they would wait for.
    values = []
    for tile in tiles:
      here = pl.ds(pl.multiple_of(tile.index * c, SUBLANES), c)
      rows = [x[here] for x in queries]
      [query] = rows_of.decode(rows, reader.dtype, reader.widths[0])
      value = reader.read(ring.at(tile.number), shared, query)
      values.append(column(weights, tile.index, value.shape[1]) * value)
    for tile, value in zip(tiles, values, strict=True):
      rows_of.put(value, reads, tile.index * c)

  walk.finish(ahead, read_tiles)
  rows_of.zero_last(reads)
  rows_of.combine(reads, table, sums, y)
