"""Gated reads on a GPU: the forward pass.

A program reads all states with a block of tokens of one head, for some columns
of what is read. Arrays are taken as the op has them, tokens before heads:
nothing is copied.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.config import TritonConfig
from ..linear_attention.operands import like
from ..linear_attention.tiles import (
  Span,
  dot,
  load,
  of_head,
  part,
  store,
  whole,
)
from ..linear_attention.triton import Plan


def fwd(
  q: jax.Array,
  states: jax.Array,
  weights: jax.Array,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> jax.Array:
  """Gated reads of all tokens.

  Args:
    q: queries [b t n k].
    states: [b s n k v] float32.
    weights: gates [b t n s].
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    y [b t n v] float32.
  """
  b, t, n, k = q.shape
  v = states.shape[-1]
  columns = min(config.columns, pl.next_power_of_2(v))
  y = like(q, b, t, n, v)
  plan = plan_of(q, config, interpret)
  return pl.pallas_call(
    functools.partial(_fwd_kernel, widths=(k, v), plan=plan),
    name="memcache_cache_read_read",
    grid=(pl.cdiv(v, columns), pl.cdiv(t, config.reads), n, b),
    in_specs=[of_head(x) for x in (q, states, weights)],
    out_specs=of_head(y),
    out_shape=y,
    compiler_params=plan.params,
    interpret=interpret,
  )(q, states, weights)


def plan_of(q, config: TritonConfig, interpret: bool) -> Plan:
  """No segments: all tokens are one."""
  t = q.shape[1]
  return Plan(t, t, 0, False, config, interpret)


def _fwd_kernel(q, states, weights, y, *, widths, plan: Plan):
  inner = whole(widths[0])
  columns = part(
    pl.program_id(0), min(plan.config.columns, y.shape[1]), widths[1]
  )
  rows = part(pl.program_id(1), plan.config.reads, plan.tokens)
  queries = load(q, rows, inner)

  def visit(i, total):
    state = load(states, i, inner, columns).astype(queries.dtype)
    gate = gates(weights, rows, i)[:, None]
    return total + gate * dot(queries, state, (1, 0), plan.interpret)

  total = jnp.zeros((rows.size, columns.size), jnp.float32)
  total = jax.lax.fori_loop(0, states.shape[0], visit, total)
  store(y, total, rows, columns)


def gates(weights: Any, rows: Span, state: Any) -> jax.Array:
  """Those of tokens for one state."""
  return load(weights, rows, state).astype(jnp.float32)
