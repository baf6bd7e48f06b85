"""Gated reads on a TPU: gradients.

Those of queries and gates are sums over states and need one product, d_y S^T;
those of states are sums over tokens and need the other. So there is a kernel
for each, with the sum as its innermost loop, and nothing is computed twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import dot, like
from .config import Config
from .mosaic_tpu import (
  compiler_params,
  for_each_state,
  states_spec,
  tokens_spec,
  weights_spec,
)


def bwd(
  q: jax.Array,
  states: jax.Array,
  weights: jax.Array,
  d_y: jax.Array,
  *,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of queries, states and gates.

  Args:
    q: queries [b n t k]; t is a multiple of `config.rows`.
    states: [b s n k v] float32.
    weights: gates [b n s t] float32.
    d_y: gradient of the reads [b n t v], in the dtype of q; 0 where there is
      no token.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    One gradient per operand, of its shape and dtype.
  """
  options = dict(config=config, interpret=interpret)
  d_q, d_weights = _tokens(q, states, weights, d_y, **options)
  return d_q, _states(q, states, weights, d_y, **options), d_weights


def _tokens(q, states, weights, d_y, *, config, interpret):
  """Gradients of what tokens bring along."""
  b, n, t, k = q.shape
  slots, v = states.shape[1], states.shape[-1]
  rows, per_block = config.rows, config.states
  specs = [
    tokens_spec(rows, k),
    states_spec(per_block, k, v),
    weights_spec(per_block, rows),
    tokens_spec(rows, v),
  ]
  return pl.pallas_call(
    functools.partial(_tokens_kernel, slots=slots),
    name="memcache_cache_read_bwd_tokens",
    grid=(b, n, t // rows, pl.cdiv(slots, per_block)),
    in_specs=specs,
    out_specs=[specs[0], specs[2]],
    out_shape=[
      like(q, *q.shape, dtype=q.dtype),
      like(q, *weights.shape),
    ],
    scratch_shapes=[
      pltpu.VMEM((k, rows), jnp.float32),
      pltpu.VMEM((v, rows), q.dtype),
      pltpu.VMEM((k, rows), jnp.float32),
    ],
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(q, states, weights, d_y)


def _tokens_kernel(
  q, states, weights, d_y, d_q, d_weights, q_t, d_y_t, d_q_t, *, slots
):
  block = pl.program_id(3)

  @pl.when(block == 0)
  def _():
    q_t[...] = q[...].T.astype(jnp.float32)
    d_y_t[...] = d_y[...].T
    d_q_t[...] = jnp.zeros_like(d_q_t)

  def visit(i):
    back = dot(states[i].astype(q.dtype), d_y_t[...])
    d_q_t[...] += weights[pl.ds(i, 1)] * back
    d_weights[pl.ds(i, 1)] = jnp.sum(q_t[...] * back, 0, keepdims=True)

  for_each_state(visit, states.shape[0], slots, block)

  @pl.when(block == pl.num_programs(3) - 1)
  def _():
    d_q[...] = d_q_t[...].astype(d_q.dtype).T


def _states(q, states, weights, d_y, *, config, interpret):
  b, n, t, k = q.shape
  slots, v = states.shape[1], states.shape[-1]
  rows, per_block = config.rows, config.states

  def turned(spec):
    """With tokens as the innermost axis of the grid."""
    index = spec.index_map
    return pl.BlockSpec(spec.block_shape, lambda b, n, s, t: index(b, n, t, s))

  return pl.pallas_call(
    functools.partial(_states_kernel, slots=slots),
    name="memcache_cache_read_bwd_states",
    grid=(b, n, pl.cdiv(slots, per_block), t // rows),
    in_specs=[
      turned(tokens_spec(rows, k)),
      turned(weights_spec(per_block, rows)),
      turned(tokens_spec(rows, v)),
    ],
    out_specs=turned(states_spec(per_block, k, v)),
    out_shape=like(q, *states.shape),
    scratch_shapes=[pltpu.VMEM((k, rows), jnp.float32)],
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(q, weights, d_y)


def _states_kernel(q, weights, d_y, d_states, q_t, *, slots):
  q_t[...] = q[...].T.astype(jnp.float32)

  @pl.when(pl.program_id(3) == 0)
  def _():
    d_states[...] = jnp.zeros_like(d_states)

  def visit(i):
    gated = (weights[pl.ds(i, 1)] * q_t[...]).astype(q.dtype)
    d_states[i] += dot(gated, d_y[...])

  for_each_state(visit, d_states.shape[0], slots, pl.program_id(2))
