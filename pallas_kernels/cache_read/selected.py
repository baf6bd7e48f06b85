"""Reads of a few selected states per token, on a TPU.

A pair of a token and a state that it selected has a place in a tile, and all
places of a tile read one state, which is fetched by a table of the tiles. The
tokens of a block stay in fast memory: their rows are copied to their places,
and what was read there is added up at the tokens, with nothing in between in
main memory. What a state is, and how it is read, is up to the caller: a matrix,
or a network of `mlp_memory`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import dot, like, wide
from .config import SelectedConfig

LANES = 128
SUBLANES = 8
_PACKED = 16
# Places that are filled together.
_PLACES = 32

Tree = Any


class Tiles(NamedTuple):
  """Where pairs have their places: p tiles of c places.

  Attributes:
    state: that each tile reads [b n p], in rising order; empty tiles, which
      come last, repeat the last one.
    rows: places of each tile in use [b n p], the first ones; 0 in empty tiles.
    token: at each place [b n p c]; any where it is not in use.
    place: of all pairs, token by token [b n rows 128]; p c for one without. A
      row holds whole tokens, `config.tokens_per_row` of them.
    weights: the gate at each place [b n p 128] float32; 0 where it is not in
      use.
  """

  state: jax.Array
  rows: jax.Array
  token: jax.Array
  place: jax.Array
  weights: jax.Array


class Reader(NamedTuple):
  """How what is stored is read, in fast memory.

  Attributes:
    name: of the kernels.
    width: of values.
    read: of the arrays of one state, those that all states share, and queries
      [c k] float32: the reads [c v] float32.
    pull: of the same, then gates and gradients of the reads. Gates come as a
      function of the width over which they are to lie, gradients as [c v]
      float32. Gradients of the queries [c k], the gates [c 1], the state and
      what is shared; float32.
  """

  name: str
  width: int
  read: Callable[..., jax.Array]
  pull: Callable[..., tuple[jax.Array, jax.Array, Tree, Tree]]


def matrices(width: int, dtype: Any) -> Reader:
  """q S of matrices of some width, with operands of a type."""

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
  return Reader(name, width, read, pull)


def fwd(
  reader: Reader,
  q: jax.Array,
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
    q: queries [b n t k]; t is a multiple of
      `config.tokens_per_row` and of 16.
    stored: arrays [b' s n x y] float32 of the states; b is a multiple of b',
      whose rows are those of as many consecutive blocks of tokens.
    shared: arrays [b' n 1 x] float32 that all states share.
    tiles: see `Tiles`.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [b n t v] float32.
  """
  b, n, t, k = q.shape
  v = reader.width
  count, c = tiles.token.shape[2:]
  return pl.pallas_call(
    functools.partial(_fwd_kernel, read=reader.read, selected=config.selected),
    name=f"{reader.name}_fwd",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(b, n, count),
      in_specs=operand_specs(q, stored, shared, tiles),
      out_specs=head_spec(t, v),
      scratch_shapes=[
        rows_of(t, k),
        pltpu.VMEM((c, k), jnp.float32),
        rows_of(count * c + SUBLANES, v),
      ],
    ),
    out_shape=like(q, b, n, t, v),
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*tiles, q, stored, shared)


def head_spec(*shape: int, memory_space=None) -> pl.BlockSpec:
  """All of a head, whatever the tile."""
  return pl.BlockSpec(
    (None, None, *shape),
    lambda b, n, p, *_: (b, n, *(0 for _ in shape)),
    memory_space=memory_space,
  )


def stored_spec(q: jax.Array, x: Any) -> pl.BlockSpec:
  """An array of the state of a tile."""
  blocks = q.shape[0] // x.shape[0]
  return pl.BlockSpec(
    (None, None, None, *x.shape[3:]),
    lambda b, n, p, state, rows: (
      *(jax.lax.div(b, blocks), state[b, n, p], n),
      *(0, 0),
    ),
  )


def shared_spec(q: jax.Array, x: Any) -> pl.BlockSpec:
  blocks = q.shape[0] // x.shape[0]
  return pl.BlockSpec(
    (None, None, *x.shape[2:]),
    lambda b, n, p, *_: (jax.lax.div(b, blocks), n, 0, 0),
  )


def operand_specs(q, stored: Tree, shared: Tree, tiles: Tiles) -> list:
  """Token, place, weights, q, stored, shared."""
  return [
    head_spec(*tiles.token.shape[2:], memory_space=pltpu.SMEM),
    head_spec(*tiles.place.shape[2:], memory_space=pltpu.SMEM),
    head_spec(*tiles.weights.shape[2:]),
    head_spec(*q.shape[2:]),
    jax.tree.map(functools.partial(stored_spec, q), stored),
    jax.tree.map(functools.partial(shared_spec, q), shared),
  ]


def compiler_params(config: SelectedConfig) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"),
    vmem_limit_bytes=config.vmem_limit_bytes,
  )


def rows_of(count: int, width: int) -> Any:
  """Fast memory for rows that are found by number.

  Whole registers side by side would each have a place of its own to compute.
  """
  lanes = LANES if width % LANES == 0 else width
  return pltpu.VMEM((width // lanes, count, lanes), jnp.float32)


def parts(ref, like) -> list:
  """Of a [rows x] reference, those that `rows_of` the width x holds apart."""
  if ref.ndim == 3:
    return [ref.at[i] for i in range(ref.shape[0])]
  count, _, lanes = like.shape
  return [ref.at[:, pl.ds(i * lanes, lanes)] for i in range(count)]


def convert(source, target) -> None:
  """Copies [t x], to another type; one of them holds rows."""
  like = source if source.ndim == 3 else target
  moves = list(zip(parts(source, like), parts(target, like), strict=True))

  @pl.loop(0, like.shape[1] // _PACKED)
  def _(group):
    rows = pl.ds(pl.multiple_of(group * _PACKED, _PACKED), _PACKED)
    for source, target in moves:
      target[rows] = source[rows].astype(target.dtype)


# Tables are read at columns that are known beforehand, and rows that are not:
# to find any other number in one takes longer than to copy what it stands for.
def gather(pairs, token, tile, rows) -> None:
  """Copies rows of tokens to the places in use of a tile.

  Args:
    pairs: tuples of rows to copy from and what to copy to, [c x].
    token: reference to that at each place.
    tile: the row of `token`.
    rows: places in use; some more are filled.
  """
  c = token.shape[1]
  moves = [
    move
    for source, target in pairs
    for move in zip(parts(source, source), parts(target, source), strict=True)
  ]
  for first in range(0, c, _PLACES):

    @pl.when(first < rows)
    def _(first=first):
      for i in range(first, min(first + _PLACES, c)):
        here = token[tile, i]
        for source, target in moves:
          target[pl.ds(i, 1)] = source[pl.ds(here, 1)]


def combine(values, place, target, selected) -> None:
  """Adds up the rows at the places of each token, to [t x] or to rows."""
  moves = list(zip(parts(values, values), parts(target, values), strict=True))
  count = moves[0][1].shape[0] // place.shape[0]

  @pl.loop(0, place.shape[0])
  def _(row):
    here = pl.ds(pl.multiple_of(row * count, SUBLANES), count)
    rows = [(source, target.at[here]) for source, target in moves]
    for i in range(count):
      places = [place[row, i * selected + j] for j in range(selected)]
      for source, target in rows:
        values = [source[pl.ds(x, 1)] for x in places]
        target[pl.ds(i, 1)] = functools.reduce(jnp.add, values)


def put(value, rows, first) -> None:
  """Stores [c x] at consecutive rows."""
  _, _, lanes = rows.shape
  for i, part in enumerate(parts(rows, rows)):
    here = pl.ds(pl.multiple_of(first, SUBLANES), value.shape[0])
    part[here] = value[:, i * lanes : (i + 1) * lanes]


def zero_last(rows) -> None:
  """What a pair without a place reads."""
  for part in parts(rows, rows):
    last = pl.ds(part.shape[0] - SUBLANES, SUBLANES)
    part[last] = jnp.zeros((SUBLANES, part.shape[1]), jnp.float32)


def gates(weights, tile, c, width):
  """Those of a tile [c width], each over its row."""
  row = jnp.broadcast_to(weights[pl.ds(tile, 1)], (LANES, LANES))
  return wide(row.T[:c], width)


def _fwd_kernel(*refs, read, selected):
  _, rows, token, place, weights, q, stored, shared, y, *refs = refs
  queries, chosen, reads = refs
  b, n, p = (pl.program_id(i) for i in range(3))
  c = chosen.shape[0]
  in_use = rows[b, n, p]

  @pl.when(p == 0)
  def _():
    convert(q, queries)
    zero_last(reads)

  @pl.when(in_use > 0)
  def _():
    gather([(queries, chosen)], token, p, in_use)
    value = read(stored, shared, chosen[...])
    put(gates(weights, p, c, value.shape[1]) * value, reads, p * c)

  @pl.when(p == pl.num_programs(2) - 1)
  def _():
    combine(reads, place, y, selected)
