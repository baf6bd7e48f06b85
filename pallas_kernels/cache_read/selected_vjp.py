"""Reads of a few selected states per token, on a TPU: gradients."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import dot, like
from .config import SelectedConfig
from .selected import (
  LANES,
  SUBLANES,
  Tiles,
  combine,
  compiler_params,
  convert,
  gates,
  gather,
  head_spec,
  operand_specs,
  put,
  rows_of,
  state_spec,
  zero_last,
)


def bwd(
  q: jax.Array,
  states: jax.Array,
  tiles: Tiles,
  d_y: jax.Array,
  *,
  config: SelectedConfig,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of queries, states and gates.

  Args:
    q: as in the forward pass.
    states: as in the forward pass.
    tiles: as in the forward pass.
    d_y: gradient of the reads [b n t v], in the dtype of q.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    Those of q, of its shape and dtype; of the states [b s n k v], for each
    block of tokens; and of the gates at their places [b n p 128].
  """
  b, n, t, k = q.shape
  _, slots, _, _, v = states.shape
  count, c = tiles.token.shape[2:]
  specs = operand_specs(q, states, tiles)
  d_states = like(q, b, slots, n, k, v)
  # States that no tile reads keep what is there before.
  zeros = jnp.zeros_like(d_states)
  d_states_spec = state_spec(q, zeros)
  return pl.pallas_call(
    functools.partial(_bwd_kernel, selected=config.selected),
    name="memcache_cache_read_selected_bwd",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(b, n, count),
      in_specs=[*specs, head_spec(t, v), pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=[specs[3], d_states_spec, specs[2]],
      scratch_shapes=[
        rows_of(t, k),
        rows_of(t, v),
        pltpu.VMEM((c, k), jnp.float32),
        pltpu.VMEM((c, v), jnp.float32),
        rows_of(count * c + SUBLANES, k),
      ],
    ),
    out_shape=[
      like(q, *q.shape, dtype=q.dtype),
      d_states,
      like(q, *tiles.weights.shape),
    ],
    input_output_aliases={len(tiles) + 3: 1},
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*tiles, q, states, d_y, zeros)


def _bwd_kernel(*refs, selected):
  state, rows, token, place, weights, q, states, d_y, _, *refs = refs
  d_q, d_states, d_weights, queries, d_reads, *refs = refs
  chosen, d_chosen, backs = refs
  b, n, p = (pl.program_id(i) for i in range(3))
  c = chosen.shape[0]
  in_use = rows[b, n, p]

  @pl.when(p == 0)
  def _():
    convert(q, queries)
    convert(d_y, d_reads)
    zero_last(backs)
    d_weights[...] = jnp.zeros_like(d_weights)

  @pl.when((p == 0) | (state[b, n, p] != state[b, n, jnp.maximum(p - 1, 0)]))
  def _():
    d_states[...] = jnp.zeros_like(d_states)

  @pl.when(in_use > 0)
  def _():
    gather([(queries, chosen), (d_reads, d_chosen)], token, p, in_use)
    query, d_read = _used(chosen, in_use), _used(d_chosen, in_use)
    d_read = d_read.astype(q.dtype)
    back = dot(d_read, states[...].astype(q.dtype), contract=(1, 1))
    gate = gates(weights, p, c, back.shape[1])
    put(gate * back, backs, p * c)
    d_weights[pl.ds(p, 1)] = _row(jnp.sum(query * back, 1, keepdims=True))
    gated = (gate * query).astype(q.dtype)
    d_states[...] += dot(gated, d_read, contract=(0, 0))

  @pl.when(p == pl.num_programs(2) - 1)
  def _():
    combine(backs, place, queries, selected)
    convert(queries, d_q)


def _used(x, rows):
  """Zeros at places that are not in use, of which sums must know nothing."""
  place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
  return jnp.where(place < rows, x[...], 0.0)


def _row(column):
  """[c 1] -> [1 128], zeros behind."""
  c = column.shape[0]
  square = jnp.broadcast_to(column, (c, LANES))
  if c < LANES:
    square = jnp.concatenate(
      [square, jnp.zeros((LANES - c, LANES), jnp.float32)]
    )
  return square.T[:1]
