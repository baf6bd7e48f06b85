"""The delta rule on a TPU: the backward pass.

A first kernel goes over the chunks again and keeps what their gradients need:
the memory before each, and its inverse. The second one comes back over them,
with the gradient of the memory in fast memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import dot, transposed
from ..linear_attention.operands import like
from .config import Config
from .mosaic_tpu import (
  Gates,
  advance,
  compiler_params,
  gates_of,
  grid,
  inverse_of,
  operand_specs,
)
from .operands import (
  BETA,
  CARRY,
  CHUNK,
  END,
  FRESH,
  FRESH_END,
  KEEP,
  LOGS,
  Operands,
)


def bwd(
  operands: Operands,
  d_y: jax.Array,
  d_end: jax.Array,
  *,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> Operands:
  """Gradients of all operands.

  Args:
    operands: those of the forward pass.
    d_y: gradient of its reads, in the dtype of v.
    d_end: gradient of the memory it returned, float32.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    One gradient per operand, of its shape and dtype. That of RESETS is 0;
    those of KEEP and FRESH_END stand at the first token of each chunk.
  """
  arrays = [x for x in operands if x is not None]
  _, _, chunks = steps = grid(operands.q, config)
  options: dict[str, Any] = dict(
    grid=steps, compiler_params=compiler_params(config), interpret=interpret
  )
  starts = operands.initial is not None
  states, inverses = _states(operands, config, options)
  specs = operand_specs(operands, config, backwards=chunks)
  gradients = pl.pallas_call(
    functools.partial(_bwd_kernel, starts=starts),
    name="memcache_delta_rule_bwd",
    in_specs=[
      *specs,
      *_kept_specs(operands, config, chunks),
      specs[2],
      specs[4],
    ],
    out_specs=specs,
    out_shape=[like(operands.q, *x.shape, dtype=x.dtype) for x in arrays],
    scratch_shapes=[_memories(operands, config)],
    **options,
  )(*arrays, states, inverses, d_y, d_end)
  return Operands(*gradients)


def _memories(operands: Operands, config: Config):
  shape = (config.heads, *operands.state.shape[2:])
  return pltpu.VMEM(shape, jnp.float32)


def _kept_specs(operands: Operands, config: Config, backwards: int = 0):
  """Memories before the chunks [b n g k v], and inverses [b n t c]."""

  def place(chunk):
    return backwards - 1 - chunk if backwards else chunk

  memory = (None, config.heads, None, *operands.state.shape[2:])
  inverse = (None, config.heads, CHUNK, CHUNK)
  return [
    pl.BlockSpec(memory, lambda b, n, c: (b, n, place(c), 0, 0)),
    pl.BlockSpec(inverse, lambda b, n, c: (b, n, place(c), 0)),
  ]


def _states(operands: Operands, config: Config, options: dict[str, Any]):
  """What is kept of each chunk."""
  q, state = operands.q, operands.state
  b, n, t, _ = q.shape
  # Queries, which nothing is written with, stay where they are.
  arrays = [x for x in operands[1:] if x is not None]
  return pl.pallas_call(
    functools.partial(_states_kernel, starts=operands.initial is not None),
    name="memcache_delta_rule_states",
    in_specs=operand_specs(operands, config)[1:],
    out_specs=_kept_specs(operands, config),
    out_shape=[
      like(q, b, n, t // CHUNK, *state.shape[2:]),
      like(q, b, n, t, CHUNK, dtype=q.dtype),
    ],
    scratch_shapes=[_memories(operands, config)],
    **options,
  )(*arrays)


def _states_kernel(*refs, starts):
  initial: Any = None
  k, v, scalars, state, *refs = refs
  if starts:
    initial, *refs = refs
  states, inverses, running = refs

  @pl.when(pl.program_id(2) == 0)
  def _():
    running[...] = state[...]

  for i in range(k.shape[0]):
    gates, before = gates_of(scalars[i]), running[i]
    overlap = dot(k[i], k[i], contract=(1, 1))
    solve = inverse_of(gates, overlap, k.dtype)
    fresh = initial[i] if starts else None
    wanted = _wanted(gates, k[i], v[i], before, fresh)
    written = _written(gates, solve, wanted)
    states[i], inverses[i] = before, solve
    running[i] = advance(gates, k[i], written, before, fresh)


def _wanted(gates: Gates, k, v, state, initial):
  """Values less what the memory returns for their keys, in float32."""
  old = gates.column(CARRY) * dot(k, state.astype(k.dtype))
  if initial is not None:
    old += gates.column(FRESH) * dot(k, initial.astype(k.dtype))
  return v.astype(jnp.float32) - old


def _written(gates: Gates, solve, wanted):
  wanted = gates.column(BETA) * wanted
  return dot(solve, wanted.astype(solve.dtype)).astype(solve.dtype)


class _Tokens(NamedTuple):
  """Of a chunk of one head: arrays [c ...]."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  d_y: jax.Array
  solve: jax.Array


def _bwd_kernel(*refs, starts):
  initial: Any = None
  d_initial: Any = None
  q, k, v, scalars, _, *refs = refs  # what the state was is in `states`
  if starts:
    initial, *refs = refs
  states, inverses, d_y, d_end, d_q, d_k, d_v, d_scalars, d_state, *refs = refs
  if starts:
    d_initial, *refs = refs
  [running] = refs

  @pl.when(pl.program_id(2) == 0)
  def _():
    running[...] = d_end[...]
    if starts:
      d_initial[...] = jnp.zeros_like(d_initial)

  for i in range(q.shape[0]):
    x = _Tokens(q[i], k[i], v[i], d_y[i], inverses[i])
    gates = gates_of(scalars[i])
    fresh = initial[i] if starts else None
    (d_q[i], d_k[i], d_v[i]), numbers, (running[i], d_fresh) = _chunk(
      x, gates, states[i], fresh, running[i]
    )
    d_scalars[i] = numbers
    if starts:
      d_initial[i] += d_fresh

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    d_state[...] = running[...]


def _chunk(x: _Tokens, gates: Gates, state, initial, d_after):
  """Gradients of tokens, of their numbers [8 c], and of both memories."""
  dtype = x.q.dtype
  cast = lambda x: x.astype(dtype)
  q, k, d_y = (y.astype(jnp.float32) for y in (x.q, x.k, x.d_y))
  beta = gates.column(BETA)
  pairs = dot(jnp.concatenate([x.k, x.q]), x.k, contract=(1, 1))
  overlap, scores = pairs[:CHUNK], pairs[CHUNK:]
  wanted = _wanted(gates, x.k, x.v, state, initial)
  written = _written(gates, x.solve, wanted)

  # Of what was written, and of what was wanted.
  left = k * gates.column(END)
  d_written = dot(cast((scores * gates.between).T), x.d_y)
  d_written += dot(cast(left), cast(d_after))
  d_wanted = dot(x.solve.T, cast(d_written))
  d_old = beta * d_wanted  # with its sign turned; also that of values
  # Of scores, and of the triangular system.
  both = jnp.concatenate([x.d_y, cast(d_wanted)])
  d_pairs = dot(both, written, contract=(1, 1))
  d_scores = d_pairs[:CHUNK] * gates.between
  row, token = (
    jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), i) for i in range(2)
  )
  d_strict = jnp.where(row > token, d_pairs[CHUNK:] * gates.between, 0.0)
  d_overlap = -beta * d_strict
  d_logs = d_scores * scores + d_overlap * overlap
  numbers = {
    BETA: _sum(d_wanted * wanted) - _sum(d_strict * overlap),
    LOGS: _sum(d_logs),
  }
  d_q = dot(cast(d_scores), x.k)
  d_k = dot(cast(d_scores.T), x.q)
  d_k += dot(cast(d_overlap + d_overlap.T), x.k)
  d_end = dot(written, cast(d_after), contract=(1, 1))
  numbers[END] = _sum(k * d_end)
  d_k += gates.column(END) * d_end

  d_memories, totals = [], {}
  both = jnp.concatenate([x.d_y, cast(d_old)])
  for memory, kind, last in (
    (state, CARRY, KEEP),
    (initial, FRESH, FRESH_END),
  ):
    if memory is None:
      d_memories.append(None)
      continue
    share = gates.column(kind)
    back = dot(both, cast(memory), contract=(1, 1))
    by_queries, by_keys = back[:CHUNK], back[CHUNK:]
    numbers[kind] = _sum(q * by_queries - k * by_keys)
    totals[last] = jnp.sum(d_after * memory)
    d_q += share * by_queries
    d_k -= share * by_keys
    readers = jnp.concatenate([x.q, -x.k]).T
    reads = jnp.concatenate([share * d_y, share * d_old])
    d_memories.append(gates.number(last) * d_after + dot(readers, cast(reads)))
  tokens = (cast(d_q), cast(d_k), cast(d_old))
  return tokens, _in_rows(numbers, totals, d_logs), d_memories


def _sum(x):
  return jnp.sum(x, 1, keepdims=True)


def _in_rows(numbers, totals, d_logs):
  """Sums of tokens [c 1] and of chunks, each in the row of its kind [8 c]."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 128), 1)
  columns = jnp.zeros((CHUNK, 128), jnp.float32)
  for kind, x in numbers.items():
    columns = jnp.where(lane == kind, x, columns)
  rows = transposed(columns)[:8]
  kinds, token = (
    jax.lax.broadcasted_iota(jnp.int32, rows.shape, i) for i in range(2)
  )
  # What a token's decay takes from it, the later ones do not lose.
  received = jnp.sum(d_logs, 0, keepdims=True)
  rows -= jnp.where(kinds == LOGS, received, 0.0)
  for kind, x in totals.items():
    rows = jnp.where((kinds == kind) & (token == 0), x, rows)
  return rows
