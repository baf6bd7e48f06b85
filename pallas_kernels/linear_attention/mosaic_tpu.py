"""Cached linear attention on a TPU: the forward pass.

One step of the grid is a block of consecutive segments of one head. It writes
their states into fast memory, where those of all earlier blocks still are,
and reads every state once for all queries of the block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .config import Config
from .operands import END, KEEP, LOGS, OWN, RESETS, WRITE, Operands, like
from .streaming import SEMAPHORES, for_each_streamed

_LANES = 128
# States per iteration of the loop over earlier blocks.
_UNROLL = 4


def dot(a, b, contract=(1, 0)):
  """Matmul of the given axes, in float32."""
  precision = None if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
  return jax.lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def wide(x, width):
  """Repeats a column that fills 128 lanes over `width` lanes."""
  return jnp.concatenate([x] * pl.cdiv(width, _LANES), axis=1)[:, :width]


def column(ref, index, width):
  """Column `index` of a [rows, lanes] reference, over `width` lanes."""
  index = jnp.asarray(index, jnp.int32)
  first = pl.multiple_of(jnp.bitwise_and(index, ~(_LANES - 1)), _LANES)
  tile = ref[:, pl.ds(first, _LANES)]
  lane = jnp.full(tile.shape, jnp.bitwise_and(index, _LANES - 1))
  return wide(jnp.take_along_axis(tile, lane, axis=1), width)


def transposed(x):
  """[x rows] -> [rows 128 n]; whole registers are what can be transposed."""
  missing = -x.shape[0] % _LANES
  if missing:
    x = jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)])
  return x.T


def causal(shape, length, first=0, transpose=False):
  """Which tokens of a piece, from `first` on, the online memory of each holds.

  The mask is [queries tokens], or the other way round.
  """
  query = jax.lax.broadcasted_iota(jnp.int32, shape, int(transpose))
  token = jax.lax.broadcasted_iota(jnp.int32, shape, int(not transpose))
  keep = query >= token
  for start in range(length - first % length, max(shape), length):
    keep &= (query < start) | (token >= start)
  return keep


def of_segment(x, segment, length):
  """Zero outside of a segment: [x rows], tokens last."""
  if x.shape[1] == length:
    return x
  token = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  first = segment * length
  return jnp.where(
    (token >= first) & (token < first + length), x, jnp.zeros_like(x)
  )


def operand_specs(
  operands: Operands, config: Config, length: int, backwards: int = 0
) -> list[pl.BlockSpec]:
  """What a step over (row, head, block of segments) takes of the operands.

  `backwards` is the number of blocks where the last one comes first, else 0.
  """
  rows = config.segments_per_block * length

  def place(block):
    return backwards - 1 - block if backwards else block

  def tokens(x):
    shape = (None, None, rows, x.shape[3])
    return pl.BlockSpec(shape, lambda b, n, p: (b, n, place(p), 0))

  def tokens_last(x):
    shape = (None, None, x.shape[2], rows)
    return pl.BlockSpec(shape, lambda b, n, p: (b, n, 0, place(p)))

  specs = [tokens(operands.q), tokens(operands.k), tokens(operands.v)]
  specs += [tokens_last(operands.weights), tokens_last(operands.scalars)]
  if operands.memories is not None:
    _, count, _, k, v = operands.memories.shape
    specs.append(stored_states(count, k, v, config))
  return specs


def stored_states(count: int, k: int, v: int, config: Config) -> pl.BlockSpec:
  """All states [count k v] of one head, or those of all where they are."""
  if config.streamed:
    return pl.BlockSpec(memory_space=pl.ANY)
  return pl.BlockSpec(
    (None, count, None, k, v), lambda b, n, p: (b, 0, n, 0, 0)
  )


def compiler_params(config: Config) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"),
    vmem_limit_bytes=config.vmem_limit_bytes,
  )


def fwd(
  operands: Operands,
  *,
  segment_length: int,
  chained: bool,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
  """Reads of all tokens and end states of all segments.

  Args:
    operands: see `Operands`; t is a multiple of a block of segments.
    segment_length: tokens of a segment.
    chained: segments go on from the one before, as far as KEEP says; else
      each starts from nothing.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [b n t v] in the dtype of v and the states [b g n k v] in float32.
  """
  q, v = operands.q, operands.v
  b, n, t, k = q.shape
  width, segments = v.shape[-1], t // segment_length
  carried = 0 if operands.memories is None else operands.memories.shape[1]
  slots = carried + segments
  per_block = config.segments_per_block
  specs = operand_specs(operands, config, segment_length)
  rows = per_block * segment_length
  ends_spec = pl.BlockSpec(
    (None, per_block, None, k, width), lambda b, n, p: (b, p, n, 0, 0)
  )
  streaming = []
  if config.streamed:
    slots, ends_spec = per_block, pl.BlockSpec(memory_space=pl.ANY)
    streaming = [
      pltpu.VMEM((per_block, k, width), jnp.float32),
      pltpu.VMEM((2, k, width), jnp.float32),
      pltpu.SemaphoreType.DMA((SEMAPHORES,)),
    ]
  return pl.pallas_call(
    functools.partial(
      _fwd_kernel,
      config=config,
      length=segment_length,
      carried=carried,
      chained=chained,
    ),
    name="memcache_cached_linear_attention_fwd",
    grid=(b, n, t // rows),
    in_specs=specs,
    out_specs=[specs[2], ends_spec],
    out_shape=[
      like(q, *v.shape, dtype=v.dtype),
      like(q, b, segments, n, k, width),
    ],
    scratch_shapes=[
      pltpu.VMEM((slots, k, width), q.dtype),
      pltpu.VMEM((rows, _round_up(operands.weights.shape[2])), jnp.float32),
      pltpu.VMEM((rows, _LANES), jnp.float32),
      pltpu.VMEM((rows, width), jnp.float32),
      pltpu.VMEM((k, width), jnp.float32),
      *streaming,
    ],
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*(x for x in operands if x is not None))


def _round_up(count):
  return pl.cdiv(count, _LANES) * _LANES


class _Piece(NamedTuple):
  """References to the tokens of a piece: [rows ...], scalars [kinds rows]."""

  q: Any
  k: Any
  v: Any
  scalars: Any
  columns: Any


def _fwd_kernel(*refs, config: Config, length, carried, chained):
  memories: Any = None
  q, k, v, weights, scalars, *refs = refs
  if carried:
    memories, *refs = refs
  y, ends, states, gates, columns, total, running, *streaming = refs
  row, head, block = (pl.program_id(i) for i in range(3))
  per_piece = config.segments_per_piece
  per_block = config.segments_per_block
  first = carried + block * per_block
  base = first if config.streamed else 0  # slot of states[0]
  new_ends = streaming[0] if config.streamed else ends

  @pl.when(block == 0)
  def _():
    running[...] = jnp.zeros_like(running)
    if carried and config.streamed:
      pltpu.sync_copy(memories.at[row, carried - 1, head], running)
    elif carried:
      running[...] = memories[carried - 1]

      @pl.loop(0, carried)
      def _(i):
        states[i] = memories[i].astype(states.dtype)

  gates[...] = transposed(weights[...])
  columns[...] = transposed(scalars[...])
  for i in range(config.pieces_per_block):
    at = pl.ds(i * per_piece * length, per_piece * length)
    piece = _Piece(
      q.at[at], k.at[at], v.at[at], scalars.at[:, at], columns.at[at]
    )
    _online(piece, total.at[at], length)
    _write(
      piece,
      states.at[pl.ds(first - base + i * per_piece, per_piece)],
      new_ends.at[pl.ds(i * per_piece, per_piece)],
      running if chained else None,
      length,
    )

    def add_read(slot, at=at):
      total[at] += _read(q.at[at], states[slot - base], gates.at[at], slot)

    for_each_in_block(add_read, first, i, config)

  def add_read_of_all(slot, state):
    total[...] += _read(q, state[...].astype(q.dtype), gates, slot)

  if config.streamed:
    _, ring, semaphores = streaming
    own = pl.ds(block * per_block, per_block)
    # Later blocks read them.
    copy = pltpu.make_async_copy(
      new_ends, ends.at[row, own, head], semaphores.at[SEMAPHORES - 1]
    )
    copy.start()
    stream = functools.partial(
      for_each_streamed, add_read_of_all, ring=[ring], semaphores=semaphores
    )
    if carried:
      stream(carried, 0, [lambda i: memories.at[row, i, head]])
    stream(block * per_block, carried, [lambda i: ends.at[row, i, head]])
    copy.wait()
  else:
    for_each_before(
      lambda slot: add_read_of_all(slot, states.at[slot]),
      *(block, carried, config, _UNROLL),
    )
  y[...] = total[...].astype(y.dtype)


def for_each_in_block(visit, first, piece, config: Config):
  """Visits the slots of the states of a block that a piece of it may read.

  `first` is the block's first slot; of the piece's own states all but the last
  are read, by the tokens that may.
  """
  count = (piece + 1) * config.segments_per_piece - 1
  if config.segments_per_piece > 1:  # many: a loop keeps the program short
    pl.loop(0, count)(lambda i: visit(first + i))
  else:
    for i in range(count):
      visit(first + i)


def for_each_before(visit, block, carried, config: Config, unroll):
  """Visits the slots of all states before a block of segments."""
  unroll = math.gcd(config.segments_per_block, unroll)
  if carried:
    pl.loop(0, carried)(visit)

  @pl.loop(0, block * (config.segments_per_block // unroll))
  def _(group):
    for i in range(unroll):
      visit(carried + group * unroll + i)


def _online(x: _Piece, total, length):
  """Reads of what was written since the start of the token's segment."""
  rows, width = x.v.shape
  decays = x.scalars.shape[0] > 1
  if decays:
    logs, resets = (column(x.columns, i, _LANES) for i in (LOGS, RESETS))
  # In pieces of as many tokens as lanes, which those before them do not read.
  for first in range(0, rows, _LANES):
    queries, tokens = pl.ds(first, rows - first), pl.ds(first, _LANES)
    scores = dot(x.q[queries], x.k[tokens], contract=(1, 1))
    keep = causal(scores.shape, length, first)
    if decays:
      row = lambda kind, tokens=tokens: x.scalars[pl.ds(kind, 1), tokens]
      keep &= resets[first:] == row(RESETS)
      # Masked before the exponential, which would overflow.
      left = jnp.exp(jnp.where(keep, logs[first:] - row(LOGS), -jnp.inf))
      scores *= left * row(WRITE)
    else:
      scores = jnp.where(keep, scores, 0.0)
    scores = scores.astype(x.q.dtype)
    read = dot(scores, x.v[tokens])
    total[queries] = total[queries] + read if first else read
  total[...] *= column(x.columns, OWN, width)


def _write(x: _Piece, states, ends, running, length):
  """States of the segments of a piece, into fast memory and the output."""
  keys = x.k[...].T
  if x.scalars.shape[0] > 1:
    keys = keys.astype(jnp.float32) * x.scalars[pl.ds(END, 1)]
  for i in range(states.shape[0]):
    mine = of_segment(keys, i, length).astype(x.k.dtype)
    state = dot(mine, x.v[...])
    if running is not None:
      keep = x.scalars[pl.ds(KEEP, 1), pl.ds(i * length, 1)]
      state += keep * running[...]
      running[...] = state
    ends[i] = state
    states[i] = state.astype(states.dtype)


def _read(q, state, gates, slot):
  """Gated reads [rows v] of one stored state."""
  return column(gates, slot, state.shape[1]) * dot(q[...], state)
