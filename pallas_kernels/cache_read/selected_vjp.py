"""Reads of a few selected states per token, on a TPU: gradients."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import like
from .config import SelectedConfig
from .selected import (
  LANES,
  SUBLANES,
  Reader,
  Tiles,
  Tree,
  combine,
  compiler_params,
  convert,
  gates,
  gather,
  head_spec,
  operand_specs,
  put,
  rows_of,
  zero_last,
)


def bwd(
  reader: Reader,
  q: jax.Array,
  stored: Tree,
  shared: Tree,
  tiles: Tiles,
  d_y: jax.Array,
  *,
  config: SelectedConfig,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, Tree, Tree, jax.Array]:
  """Gradients of queries, states and gates.

  Args:
    reader: as in the forward pass.
    q: as in the forward pass.
    stored: as in the forward pass.
    shared: as in the forward pass.
    tiles: as in the forward pass.
    d_y: gradient of the reads [b n t v], in the dtype of q.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    Those of q, of its shape and dtype; for each block of tokens, of what is
    stored [b s n x y] and shared [b n 1 x]; and of the gates at their places
    [b n p 128].
  """
  b, _, t, k = q.shape
  v = d_y.shape[-1]
  count, c = tiles.token.shape[2:]
  of_blocks = lambda x: like(q, b, *x.shape[1:])
  d_stored, d_shared = jax.tree.map(of_blocks, (stored, shared))
  # States that no tile reads keep what is there before.
  zeros = jax.tree.map(jnp.zeros_like, d_stored)
  specs = operand_specs(q, stored, shared, tiles)
  d_specs = operand_specs(q, d_stored, d_shared, tiles)
  operands = (*tiles, q, stored, shared, d_y)
  first, leaves = len(jax.tree.leaves(operands)), len(jax.tree.leaves(zeros))
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    functools.partial(_bwd_kernel, pull=reader.pull, selected=config.selected),
    name=f"{reader.name}_bwd",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(b, q.shape[1], count),
      in_specs=[
        *specs,
        head_spec(t, v),
        jax.tree.map(lambda _: anywhere, zeros),
      ],
      out_specs=(*d_specs[3:], d_specs[2]),
      scratch_shapes=[
        rows_of(t, k),
        rows_of(t, v),
        pltpu.VMEM((c, k), jnp.float32),
        pltpu.VMEM((c, v), jnp.float32),
        rows_of(count * c + SUBLANES, k),
      ],
    ),
    out_shape=(
      like(q, *q.shape, dtype=q.dtype),
      d_stored,
      d_shared,
      like(q, *tiles.weights.shape),
    ),
    input_output_aliases={first + i: 1 + i for i in range(leaves)},
    compiler_params=compiler_params(config),
    interpret=interpret,
  )(*operands, zeros)


def _bwd_kernel(*refs, pull, selected):
  state, rows, token, place, weights, q, stored, shared, d_y, _, *refs = refs
  d_q, d_stored, d_shared, d_weights, *refs = refs
  queries, d_reads, chosen, d_chosen, backs = refs
  b, n, p = (pl.program_id(i) for i in range(3))
  c = chosen.shape[0]
  in_use = rows[b, n, p]

  @pl.when(p == 0)
  def _():
    convert(q, queries)
    convert(d_y, d_reads)
    zero_last(backs)
    jax.tree.map(_clear, (d_weights, d_shared))

  @pl.when((p == 0) | (state[b, n, p] != state[b, n, jnp.maximum(p - 1, 0)]))
  def _():
    jax.tree.map(_clear, d_stored)

  @pl.when(in_use > 0)
  def _():
    gather([(queries, chosen), (d_reads, d_chosen)], token, p, in_use)
    query, d_read = _used(chosen, in_use), _used(d_chosen, in_use)
    gate = functools.partial(gates, weights, p, c)
    back, d_gate, of_state, of_shared = pull(
      stored, shared, query, gate, d_read
    )
    put(back, backs, p * c)
    d_weights[pl.ds(p, 1)] = _row(d_gate)
    jax.tree.map(_add, (d_stored, d_shared), (of_state, of_shared))

  @pl.when(p == pl.num_programs(2) - 1)
  def _():
    combine(backs, place, queries, selected)
    convert(queries, d_q)


def _clear(ref):
  ref[...] = jnp.zeros_like(ref)


def _add(ref, value):
  ref[...] += value


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
