"""Gated reads on a GPU: gradients.

Those of queries and gates are sums over states, which a program goes along as
the forward pass does; those of states are sums over tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.config import TritonConfig
from ..linear_attention.operands import like
from ..linear_attention.tiles import (
  dot,
  load,
  of_head,
  part,
  parts_of_head,
  store,
  whole,
)
from ..linear_attention.triton import Plan, outer
from .triton import gates, plan_of


def bwd(
  q: jax.Array,
  states: jax.Array,
  weights: jax.Array,
  d_y: jax.Array,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of queries, states and gates.

  Args:
    q: queries [b t n k].
    states: [b s n k v] float32.
    weights: gates [b t n s].
    d_y: gradient of the reads [b t n v], in the dtype of q.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    One gradient per operand, of its shape; those of states and gates float32.
  """
  b, t, n, k = q.shape
  slots, v = states.shape[1], states.shape[-1]
  columns = min(config.columns, pl.next_power_of_2(k))
  parts = pl.cdiv(k, columns)
  plan = plan_of(q, config, interpret)
  d_weights = like(q, parts, *weights.shape)
  d_q, d_weights = pl.pallas_call(
    functools.partial(_tokens_kernel, widths=(k, v), plan=plan),
    name="memcache_cache_read_read_vjp",
    grid=(parts, pl.cdiv(t, config.reads), n, b),
    in_specs=[of_head(x) for x in (q, states, weights, d_y)],
    out_specs=[of_head(q), parts_of_head(of_head, d_weights)],
    out_shape=[like(q, *q.shape, dtype=q.dtype), d_weights],
    compiler_params=plan.params,
    interpret=interpret,
  )(q, states, weights, d_y)
  d_states = outer(
    "memcache_cache_read_states_vjp",
    {"left": q, "right": d_y, "weights": weights},
    slots,
    plan,
    span=lambda slot: (0, t),
    gate=lambda x, slot, here: gates(x["weights"], here, slot),
  )
  return d_q, d_states, jnp.sum(d_weights, 0)


def _tokens_kernel(
  q, states, weights, d_y, d_q, d_weights, *, widths, plan: Plan
):
  inner = whole(widths[1])
  columns = part(
    pl.program_id(0), min(plan.config.columns, d_q.shape[1]), widths[0]
  )
  rows = part(pl.program_id(1), plan.config.reads, plan.tokens)
  left = load(d_y, rows, inner)
  queries = load(q, rows, columns).astype(jnp.float32)

  def visit(i, total):
    state = load(states, i, columns, inner).astype(left.dtype)
    back = dot(left, state, (1, 1), plan.interpret)
    store(d_weights, jnp.sum(queries * back, 1), rows, i)
    return total + gates(weights, rows, i)[:, None] * back

  total = jnp.zeros((rows.size, columns.size), jnp.float32)
  total = jax.lax.fori_loop(0, states.shape[0], visit, total)
  store(d_q, total, rows, columns)
