"""Cached linear attention on a TPU: the backward pass.

Blocks of segments come in reverse order; the gradients of all states stay in
fast memory and are complete when their own segment is reached. Products that
have one number per query are laid out with queries last, where multiplying by
a gate, and summing up the gradient of one, cost nothing extra: `q_t` and so on
are transposes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .config import Config
from .mosaic_tpu import (
  causal,
  column,
  compiler_params,
  dot,
  for_each_before,
  for_each_in_block,
  operand_specs,
  stored_states,
  transposed,
)
from .operands import END, KEEP, LOGS, OWN, RESETS, WRITE, Operands, like
from .streaming import SEMAPHORES, for_each_streamed

_LANES = 128
_SUBLANES = 8
# States per iteration of the loop over earlier blocks.
_UNROLL = 2


def bwd(
  operands: Operands,
  ends: jax.Array,
  d_y: jax.Array,
  d_ends: jax.Array,
  *,
  segment_length: int,
  chained: bool,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> Operands:
  """Gradients of all operands.

  Args:
    operands: those of the forward pass.
    ends: the states it returned.
    d_y: gradient of its reads, in the dtype of v.
    d_ends: gradient of its states, float32.
    segment_length: as in the forward pass.
    chained: as in the forward pass.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    One gradient per operand, of its shape and dtype. Rows of `weights` that
    the forward pass does not read have gradient 0; so has RESETS. That of KEEP
    stands at the first token of each segment.
  """
  b, n, t, k = operands.q.shape
  width, segments = operands.v.shape[-1], t // segment_length
  carried = 0 if operands.memories is None else operands.memories.shape[1]
  slots, per_block = carried + segments, config.segments_per_block
  rows = per_block * segment_length
  specs = operand_specs(operands, config, segment_length, t // rows)
  ends_spec = stored_states(segments, k, width, config)
  arrays = [x for x in operands if x is not None]
  inputs = [*arrays, d_y, ends, d_ends]
  outputs, out_specs, aliases, streaming = arrays, specs, {}, []
  if config.streamed:
    # Sums of the gradients of all states, which grow where they are.
    if operands.memories is not None:
      nothing = jnp.zeros_like(operands.memories)
      inputs[-1] = jnp.concatenate([nothing, d_ends], axis=1)
    outputs, out_specs = [*arrays[:5], inputs[-1]], [*specs[:5], ends_spec]
    aliases = {len(inputs) - 1: 5}
    slots = 1 + per_block
    streaming = [
      pltpu.VMEM((slots, k, width), jnp.float32),
      pltpu.VMEM((2, k, width), jnp.float32),
      pltpu.VMEM((2, k, width), jnp.float32),
      pltpu.SemaphoreType.DMA((SEMAPHORES + 2,)),
    ]
  gradients = pl.pallas_call(
    functools.partial(
      _bwd_kernel,
      config=config,
      length=segment_length,
      carried=carried,
      chained=chained,
    ),
    name="memcache_cached_linear_attention_bwd",
    grid=(b, n, t // rows),
    in_specs=[*specs, specs[2], ends_spec, ends_spec],
    out_specs=out_specs,
    out_shape=[like(x, *x.shape, dtype=x.dtype) for x in outputs],
    input_output_aliases=aliases,
    scratch_shapes=[
      pltpu.VMEM((slots, k, width), operands.q.dtype),
      pltpu.VMEM((slots, k, width), jnp.float32),
      pltpu.VMEM((k, rows), operands.q.dtype),
      pltpu.VMEM((width, rows), operands.q.dtype),
      pltpu.VMEM((k, rows), jnp.float32),
      pltpu.VMEM((rows, _LANES), jnp.float32),
      *streaming,
    ],
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*inputs)
  d_memories = gradients[5][:, :carried] if carried else None
  return Operands._make([*gradients[:5], d_memories])


class _Piece(NamedTuple):
  """References to the tokens of a piece: [rows ...], or tokens last."""

  q: Any
  k: Any
  v: Any
  d_y: Any
  columns: Any
  q_t: Any
  d_y_t: Any
  d_q_t: Any
  weights: Any
  d_weights: Any
  scalars: Any
  d_scalars: Any

  def at(self, rows) -> "_Piece":
    first = [x.at[rows] for x in self[:5]]
    return _Piece(*first, *(x.at[:, rows] for x in self[5:]))


def _bwd_kernel(*refs, config: Config, length, carried, chained):
  memories: Any = None
  d_memories: Any = None
  q, k, v, weights, scalars, *refs = refs
  if carried:
    memories, *refs = refs
  d_y, ends, d_ends, d_q, d_k, d_v, d_weights, d_scalars, *refs = refs
  if config.streamed:
    d_ends, *refs = refs  # the sums of all gradients, where they grow
  elif carried:
    d_memories, *refs = refs
  states, d_states, q_t, d_y_t, d_q_t, columns, *streaming = refs
  step, steps = pl.program_id(2), pl.num_programs(2)
  block = steps - 1 - step
  per_piece = config.segments_per_piece
  first = carried + block * config.segments_per_block
  base = first - 1 if config.streamed else 0  # slot of states[0]
  q_t[...] = q[...].T
  d_y_t[...] = d_y[...].T
  columns[...] = transposed(scalars[...])
  d_q_t[...] = jnp.zeros_like(d_q_t)
  d_weights[...] = jnp.zeros_like(d_weights)
  all_tokens = _Piece(
    *(q, k, v, d_y, columns, q_t, d_y_t, d_q_t),
    *(weights, d_weights, scalars, d_scalars),
  )
  if config.streamed:
    stored = _Stored(memories, ends, d_ends, states, d_states, *streaming)
    _read_streamed(stored, all_tokens, block, carried, config, chained)
  else:

    @pl.when(step == 0)
    def _():
      _load(memories, ends, d_ends, states, d_states, carried)

    for_each_before(
      lambda i: _read(all_tokens, i, states.at[i], d_states.at[i]),
      *(block, carried, config, _UNROLL),
    )
  for i in reversed(range(config.pieces_per_block)):
    at = pl.ds(i * per_piece * length, per_piece * length)
    piece = all_tokens.at(at)

    def read(slot, piece=piece):
      here = slot - base
      _read(piece, slot, states.at[here], d_states.at[here])

    for_each_in_block(read, first, i, config)
    d_k_read, d_v_read = _online(piece, length)
    d_k_write, d_v_write = _write(
      *(piece, states, d_states, first + i * per_piece, base),
      *(length, per_piece, chained),
    )
    d_k[at] = (d_k_read + d_k_write).astype(d_k.dtype)
    d_v[at] = (d_v_read + d_v_write).astype(d_v.dtype)
  d_q[...] = d_q_t[...].astype(d_q.dtype).T
  if config.streamed and chained:
    # What the block before gets from going on with its last state.
    @pl.when(first > 0)
    def _():
      _copy(d_states.at[0], _of_head(d_ends, first - 1))

  elif carried and not config.streamed:
    # Complete after the first block, which comes last.
    @pl.when(step == steps - 1)
    def _():
      d_memories[...] = d_states[pl.ds(0, carried)]


def _load(memories, ends, d_ends, states, d_states, carried):
  """All states of a head, and what their gradients begin with."""
  if carried:

    @pl.loop(0, carried)
    def _(i):
      states[i] = memories[i].astype(states.dtype)
      d_states[i] = jnp.zeros_like(d_states[i])

  @pl.loop(0, ends.shape[0])
  def _(i):
    states[carried + i] = ends[i].astype(states.dtype)
    d_states[carried + i] = d_ends[i]


class _Stored(NamedTuple):
  """References to states in main memory, and where they come to."""

  memories: Any
  ends: Any
  d_sums: Any
  states: Any
  d_states: Any
  fetched: Any
  ring: Any
  d_ring: Any
  semaphores: Any


def _of_head(ref, slot):
  return ref.at[pl.program_id(0), slot, pl.program_id(1)]


def _copy(source, target):
  pltpu.sync_copy(source, target)


def _read_streamed(x: _Stored, tokens, block, carried, config, chained):
  """Reads all states before a block, and fetches its own and the last one."""
  per_block = config.segments_per_block
  first = carried + block * per_block
  own = pl.ds(1, per_block)
  copies = [
    pltpu.make_async_copy(
      _of_head(x.ends, pl.ds(block * per_block, per_block)),
      x.fetched.at[own],
      x.semaphores.at[SEMAPHORES],
    ),
    pltpu.make_async_copy(
      _of_head(x.d_sums, pl.ds(first, per_block)),
      x.d_states.at[own],
      x.semaphores.at[SEMAPHORES + 1],
    ),
  ]
  for copy in copies:
    copy.start()
  stream = functools.partial(
    for_each_streamed,
    functools.partial(_read, tokens),
    ring=[x.ring, x.d_ring],
    semaphores=x.semaphores,
  )
  d_sum = lambda first: lambda i: _of_head(x.d_sums, first + i)
  if carried:
    stream(carried, 0, [lambda i: _of_head(x.memories, i), d_sum(0)])
  stream(
    *(block * per_block, carried),
    [lambda i: _of_head(x.ends, i), d_sum(carried)],
  )
  for copy in copies:
    copy.wait()
  x.states[own] = x.fetched[own].astype(x.states.dtype)
  if chained:

    @pl.when(block > 0)
    def _():
      _copy(_of_head(x.ends, block * per_block - 1), x.fetched.at[0])

    if carried:

      @pl.when(block == 0)
      def _():
        _copy(_of_head(x.memories, carried - 1), x.fetched.at[0])

    @pl.when(first > 0)
    def _():
      _copy(_of_head(x.d_sums, first - 1), x.d_states.at[0])
      x.states[0] = x.fetched[0].astype(x.states.dtype)


def _read(x: _Piece, slot, state, d_state):
  """Gradients of reading one stored state."""
  rows, here = _row_of(x.weights, slot)
  weight = jnp.where(here, x.weights[rows], 0.0).sum(0, keepdims=True)
  queries = x.q_t[...].astype(jnp.float32)
  back = dot(state[...].astype(x.q.dtype), x.d_y_t[...])
  x.d_q_t[...] += weight * back
  d_weight = jnp.sum(queries * back, 0, keepdims=True)
  x.d_weights[rows] += jnp.where(here, d_weight, 0.0)
  d_state[...] += dot((weight * queries).astype(x.q.dtype), x.d_y[...])


def _row_of(ref, index):
  """The register that a row is part of, and where in it that row is."""
  first = pl.multiple_of(jnp.bitwise_and(index, ~(_SUBLANES - 1)), _SUBLANES)
  rows = pl.ds(first, _SUBLANES)
  sublane = jax.lax.broadcasted_iota(jnp.int32, (_SUBLANES, ref.shape[1]), 0)
  return rows, sublane == jnp.bitwise_and(index, _SUBLANES - 1)


def _online(x: _Piece, length):
  """Gradients [rows k], [rows v] of reading the online memory."""
  rows, dtype = x.q.shape[0], x.q.dtype
  # Both are [tokens queries].
  scores = dot(x.k[...], x.q_t[...])
  d_scores = dot(x.v[...], x.d_y_t[...])
  keep = causal((rows, rows), length, transpose=True)
  own = x.scalars[pl.ds(OWN, 1)]
  if x.scalars.shape[0] == 1:
    both = jnp.where(keep, scores * d_scores, 0.0)
    x.d_scalars[...] = jnp.sum(both, 0, keepdims=True)
    taken = jnp.where(keep, jnp.broadcast_to(own, keep.shape), 0.0)
  else:
    logs = x.scalars[pl.ds(LOGS, 1)] - column(x.columns, LOGS, rows)
    keep &= x.scalars[pl.ds(RESETS, 1)] == column(x.columns, RESETS, rows)
    decay = jnp.where(keep, jnp.exp(jnp.where(keep, logs, 0.0)), 0.0)
    write = column(x.columns, WRITE, rows)
    both = scores * d_scores * decay
    _store_scalars(
      x,
      jnp.sum(both * write, 0, keepdims=True),
      row(jnp.sum(both * own, 1, keepdims=True)),
    )
    taken = decay * write * own
  d_v = dot((scores * taken).astype(dtype), x.d_y[...])
  d_scores = (d_scores * taken).astype(dtype)
  x.d_q_t[...] += dot(x.k[...].T, d_scores)
  return dot(d_scores, x.q[...]), d_v


def _store_scalars(x: _Piece, d_own, d_write):
  # What a query takes of a token is own exp(logs - logs') write', of which
  # logs have the gradients that the two factors tell.
  own, write = x.scalars[pl.ds(OWN, 1)], x.scalars[pl.ds(WRITE, 1)]
  x.d_scalars[pl.ds(OWN, 1)] = d_own
  x.d_scalars[pl.ds(WRITE, 1)] = d_write
  x.d_scalars[pl.ds(LOGS, 1)] = own * d_own - write * d_write
  x.d_scalars[pl.ds(RESETS, 1)] = jnp.zeros_like(d_own)
  x.d_scalars[pl.ds(KEEP, 1)] = jnp.zeros_like(d_own)


def row(x):
  """[rows 1] -> [1 rows]."""
  return jnp.broadcast_to(x, (x.shape[0], _LANES)).T[:1]


def _write(x: _Piece, states, d_states, slot, base, length, per_piece, chained):
  """Gradients [rows k], [rows v] of writing states, the last one first."""
  dtype = x.k.dtype
  keys, values = [], []
  for i in reversed(range(per_piece)):
    at = pl.ds(i * length, length)
    here = slot + i - base
    d_state = d_states[here]
    rounded = d_state.astype(dtype)
    keys.insert(0, dot(x.v[at], rounded, contract=(1, 1)))
    values.insert(0, dot(x.k[at], rounded))
    if chained:
      keep = pl.ds(KEEP, 1), pl.ds(i * length, 1)

      @pl.when(slot + i > 0)  # else there is no state before
      def _(d_state=d_state, here=here, keep=keep):
        _go_on(
          *(d_state, x.scalars.at[keep], x.d_scalars.at[keep]),
          *(states.at[here - 1], d_states.at[here - 1]),
        )

  d_k, d_v = jnp.concatenate(keys), jnp.concatenate(values)
  if x.scalars.shape[0] == 1:
    return d_k, d_v
  d_end = jnp.sum(x.k[...].astype(jnp.float32) * d_k, 1, keepdims=True)
  x.d_scalars[pl.ds(END, 1)] = row(d_end)
  d_k *= column(x.columns, END, d_k.shape[1])
  d_v *= column(x.columns, END, d_v.shape[1])
  return d_k, d_v


def _go_on(d_state, keep, d_keep, before, d_before):
  """Gradients of going on from the state before."""
  product = d_state * before[...].astype(jnp.float32)
  product = jnp.sum(product, 0, keepdims=True)
  d_keep[...] = jnp.sum(product, 1, keepdims=True)
  d_before[...] += keep[...] * d_state
