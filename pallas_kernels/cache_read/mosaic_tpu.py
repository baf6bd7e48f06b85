"""Gated reads on a TPU.

One step of the grid reads a block of states with a block of tokens of one
head. Tokens stand last meanwhile, where a gate is a row, with which products
are multiplied at no extra cost: `q_t` and so on are transposes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import dot, like
from .config import Config

# States per iteration of the loop over those of a block.
UNROLL = 4


def fwd(
  q: jax.Array,
  states: jax.Array,
  weights: jax.Array,
  *,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """Gated reads of all tokens.

  Args:
    q: queries [b n t k]; t is a multiple of `config.rows`.
    states: [b s n k v] float32.
    weights: gates [b n s t] float32.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [b n t v] float32.
  """
  b, n, t, k = q.shape
  slots, v = states.shape[1], states.shape[-1]
  rows, per_block = config.rows, config.states
  return pl.pallas_call(
    functools.partial(_fwd_kernel, slots=slots),
    name="memcache_cache_read_fwd",
    grid=(b, n, t // rows, pl.cdiv(slots, per_block)),
    in_specs=[
      tokens_spec(rows, k),
      states_spec(per_block, k, v),
      weights_spec(per_block, rows),
    ],
    out_specs=tokens_spec(rows, v),
    out_shape=like(q, b, n, t, v),
    scratch_shapes=[
      pltpu.VMEM((k, rows), q.dtype),
      pltpu.VMEM((v, rows), jnp.float32),
    ],
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(q, states, weights)


def tokens_spec(rows: int, width: int) -> pl.BlockSpec:
  """A block of tokens, in a grid of rows, heads, tokens and states."""
  return pl.BlockSpec(
    (None, None, rows, width), lambda b, n, t, s: (b, n, t, 0)
  )


def states_spec(count: int, k: int, v: int) -> pl.BlockSpec:
  return pl.BlockSpec(
    (None, count, None, k, v), lambda b, n, t, s: (b, s, n, 0, 0)
  )


def weights_spec(count: int, rows: int) -> pl.BlockSpec:
  return pl.BlockSpec(
    (None, None, count, rows), lambda b, n, t, s: (b, n, s, t)
  )


def compiler_params(config: Config) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
    vmem_limit_bytes=config.vmem_limit_bytes,
  )


def for_each_state(visit: Any, per_block: int, slots: int, block: Any) -> None:
  """Visits the states of a block, of which the last may have fewer."""
  count = jnp.minimum(per_block, slots - block * per_block)
  groups = jax.lax.div(count, UNROLL)

  @pl.loop(0, groups)
  def _(group):
    for i in range(UNROLL):
      visit(group * UNROLL + i)

  if slots % UNROLL:  # blocks are multiples of it
    pl.loop(groups * UNROLL, count)(visit)


def _fwd_kernel(q, states, weights, y, q_t, y_t, *, slots):
  block = pl.program_id(3)

  @pl.when(block == 0)
  def _():
    q_t[...] = q[...].T
    y_t[...] = jnp.zeros_like(y_t)

  def visit(i):
    state = states[i].astype(q.dtype)
    y_t[...] += weights[pl.ds(i, 1)] * dot(state, q_t[...], contract=(0, 0))

  for_each_state(visit, states.shape[0], slots, block)

  @pl.when(block == pl.num_programs(3) - 1)
  def _():
    y[...] = y_t[...].T
