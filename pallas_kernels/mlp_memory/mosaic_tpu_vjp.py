"""Gated reads of stored networks on a TPU: the backward pass.

A step of the grid sends all tokens of one head through one network, chunk by
chunk, forwards again and backwards. So the gradients of a network are complete
after one step, and those of queries, which are sums over networks, stay in fast
memory from the first network to the last one.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import like
from .config import GradientConfig
from .mosaic_tpu import column
from .network import Arrays, Forward, pull

_LANES = 128


def bwd(
  forward: Forward,
  q: jax.Array,
  networks: Arrays,
  static: Arrays,
  gates: jax.Array,
  d_y: jax.Array,
  *,
  config: GradientConfig,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, Arrays, Arrays, jax.Array]:
  """Gradients of queries, networks, static parameters and gates.

  Args:
    forward: the network.
    q: queries [b n t k]; t is `config.tokens`.
    networks: as in the forward pass.
    static: as in the forward pass.
    gates: [b n s 1 t] float32.
    d_y: gradient of the reads [b n t v], in the dtype of q; 0 where there is
      no token.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    One gradient per operand, of its shape and dtype.
  """
  b, n, t, k = q.shape
  count = gates.shape[2]

  def of_network(x):
    shape = (None, None, None, *x.shape[3:])
    return pl.BlockSpec(shape, lambda b, n, s: (b, s, n, 0, 0))

  def of_head(x):
    shape = (None, None, *x.shape[2:])
    return pl.BlockSpec(shape, lambda b, n, s: (b, n, 0, 0))

  gate = pl.BlockSpec((None, None, None, 1, t), lambda b, n, s: (b, n, s, 0, 0))
  specs = [
    of_head(q),
    jax.tree.map(of_network, networks),
    jax.tree.map(of_head, static),
    gate,
  ]
  of = lambda x: like(q, *x.shape, dtype=x.dtype)
  return pl.pallas_call(
    functools.partial(_bwd_kernel, forward, config.chunk),
    name="memcache_mlp_memory_read_bwd",
    grid=(b, n, count),
    in_specs=[*specs, of_head(d_y)],
    out_specs=tuple(specs),
    out_shape=jax.tree.map(of, (q, networks, static, gates)),
    scratch_shapes=[pltpu.VMEM((t, k), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=config.vmem_limit_bytes,
    ),
    interpret=interpret,
  )(q, networks, static, gates, d_y)


def _bwd_kernel(forward, chunk, *refs):
  q, network, static, gates, d_y, *refs = refs
  d_q, d_network, d_static, d_gates, total = refs
  place = pl.program_id(2)

  @pl.when(place == 0)
  def _():
    jax.tree.map(_clear, d_static)

  jax.tree.map(_clear, d_network)

  @pl.loop(0, q.shape[0] // chunk)
  def _(i):
    rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
    d_read = d_y[rows].astype(jnp.float32)
    gate = column(gates[:, rows], d_read.shape[1])
    x = q[rows].astype(jnp.float32)
    d_x, d_gate, *others = pull(
      forward, q.dtype, network, static, x, gate, d_read
    )
    before = jnp.where(place == 0, 0.0, total[rows])
    total[rows] = before + d_x
    d_q[rows] = total[rows].astype(d_q.dtype)  # the last one stays
    d_gates[:, rows] = jnp.broadcast_to(d_gate, (chunk, _LANES)).T[:1]
    jax.tree.map(_add, (d_network, d_static), tuple(others))


def _clear(ref):
  ref[...] = jnp.zeros_like(ref)


def _add(ref, value):
  ref[...] += value
