"""The delta rule on a TPU: the forward pass.

One step of the grid is a chunk of some heads. Their memories stay in fast
memory from one chunk to the next.
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
from .inverse import inverse
from .operands import (
  BETA,
  CARRY,
  CHUNK,
  END,
  FRESH,
  FRESH_END,
  KEEP,
  LOGS,
  RESETS,
  Operands,
)


def fwd(
  operands: Operands,
  *,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
  """Reads of all tokens and the memory after the last one.

  Args:
    operands: see `Operands`.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [b n t v] in the dtype of v and the memory [b n k v] in float32.
  """
  arrays = [x for x in operands if x is not None]
  q, v, state = operands.q, operands.v, operands.state
  specs = operand_specs(operands, config)
  return pl.pallas_call(
    functools.partial(_fwd_kernel, starts=operands.initial is not None),
    name="memcache_delta_rule_fwd",
    grid=grid(q, config),
    in_specs=specs,
    out_specs=[specs[2], specs[4]],
    out_shape=[like(q, *v.shape, dtype=v.dtype), like(q, *state.shape)],
    scratch_shapes=[pltpu.VMEM((config.heads, *state.shape[2:]), jnp.float32)],
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*arrays)


def grid(q: jax.Array, config: Config) -> tuple[int, int, int]:
  b, n, t, _ = q.shape
  return b, n // config.heads, t // CHUNK


def operand_specs(
  operands: Operands, config: Config, backwards: int = 0
) -> list[pl.BlockSpec]:
  """What a step over (row, heads, chunk) takes of the operands.

  `backwards` is the number of chunks where the last one comes first, else 0.
  """

  def place(chunk):
    return backwards - 1 - chunk if backwards else chunk

  def tokens(x):
    shape = (None, config.heads, CHUNK, x.shape[3])
    return pl.BlockSpec(shape, lambda b, n, c: (b, n, place(c), 0))

  tokens_last = pl.BlockSpec(
    (None, config.heads, operands.scalars.shape[2], CHUNK),
    lambda b, n, c: (b, n, 0, place(c)),
  )
  memory = pl.BlockSpec(
    (None, config.heads, *operands.state.shape[2:]),
    lambda b, n, c: (b, n, 0, 0),
  )
  specs = [tokens(operands.q), tokens(operands.k), tokens(operands.v)]
  specs += [tokens_last, memory]
  return specs if operands.initial is None else [*specs, memory]


def compiler_params(config: Config) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"),
    vmem_limit_bytes=config.vmem_limit_bytes,
  )


class Gates(NamedTuple):
  """The numbers of a chunk of one head.

  Attributes:
    rows: all of them, tokens last [8 c].
    columns: the same, tokens first [c 128].
    between: of what the token of a column wrote, what is left at that of a row
      [c c]; zero above the diagonal.
  """

  rows: jax.Array
  columns: jax.Array
  between: jax.Array

  def column(self, kind: int) -> jax.Array:
    return self.columns[:, kind : kind + 1]

  def number(self, kind: int) -> jax.Array:
    return self.rows[kind : kind + 1, :1]


def gates_of(scalars: jax.Array) -> Gates:
  columns = transposed(scalars)
  logs = columns[:, LOGS : LOGS + 1] - scalars[LOGS : LOGS + 1]
  keep = columns[:, RESETS : RESETS + 1] == scalars[RESETS : RESETS + 1]
  row, token = (
    jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), i) for i in range(2)
  )
  keep &= row >= token
  # Masked before the exponential, which would overflow.
  between = jnp.exp(jnp.where(keep, logs, 0.0))
  return Gates(scalars, columns, jnp.where(keep, between, 0.0))


def inverse_of(gates: Gates, overlap: jax.Array, dtype: Any) -> jax.Array:
  """What makes written values of wanted ones, in `dtype` [c c]."""
  row, token = (
    jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), i) for i in range(2)
  )
  strict = gates.column(BETA) * overlap * gates.between
  strict = jnp.where(row > token, strict, 0.0)
  return inverse(strict, dtype).astype(dtype)


def advance(gates: Gates, k, written, state, initial):
  """The memory after a chunk, in float32."""
  keys = k.T.astype(jnp.float32) * gates.rows[END : END + 1]
  state = gates.number(KEEP) * state + dot(keys.astype(k.dtype), written)
  if initial is not None:
    state += gates.number(FRESH_END) * initial
  return state


def _fwd_kernel(*refs, starts):
  initial: Any = None
  q, k, v, scalars, state, *refs = refs
  if starts:
    initial, *refs = refs
  y, end, running = refs
  dtype = q.dtype

  @pl.when(pl.program_id(2) == 0)
  def _():
    running[...] = state[...]

  for i in range(q.shape[0]):
    gates = gates_of(scalars[i])
    both = jnp.concatenate([k[i], q[i]])
    pairs = dot(both, k[i], contract=(1, 1))
    solve = inverse_of(gates, pairs[:CHUNK], dtype)
    before = running[i]
    reads = dot(both, before.astype(dtype))
    old = gates.column(CARRY) * reads[:CHUNK]
    read = gates.column(CARRY) * reads[CHUNK:]
    fresh = None
    if starts:
      fresh = initial[i]
      reads = dot(both, fresh.astype(dtype))
      old += gates.column(FRESH) * reads[:CHUNK]
      read += gates.column(FRESH) * reads[CHUNK:]
    wanted = gates.column(BETA) * (v[i].astype(jnp.float32) - old)
    written = dot(solve, wanted.astype(dtype)).astype(dtype)
    scores = pairs[CHUNK:] * gates.between
    read += dot(scores.astype(dtype), written)
    y[i] = read.astype(y.dtype)
    running[i] = advance(gates, k[i], written, before, fresh)

  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    end[...] = running[...]
