"""Gated reads of stored networks on a TPU: the forward pass.

One step of the grid sends a block of tokens of one head through one network,
from which nothing but the gated output comes out of fast memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import like, wide
from .config import Config
from .network import Arrays, Forward, read

_LANES = 128


def fwd(
  forward: Forward,
  q: jax.Array,
  networks: Arrays,
  static: Arrays,
  gates: jax.Array,
  *,
  width: int,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """Gated reads of all tokens.

  Args:
    forward: the network.
    q: queries [b n t k]; t is a multiple of `config.rows`.
    networks: weights of each map, by its name [b s n i o] float32, and its
      bias, if it has one [b s n 1 o] float32.
    static: parameters that all networks share [b n 1 x] float32.
    gates: [b n s 1 t] float32; a row of their own, as none can be taken out of
      several at a place that is not known.
    width: of values.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [b n t v] float32.
  """
  b, n, t, k = q.shape
  count, rows = gates.shape[2], config.rows

  def stored(x):
    shape = (None, None, None, *x.shape[3:])
    return pl.BlockSpec(shape, lambda b, n, t, s: (b, s, n, 0, 0))

  def shared(x):
    shape = (None, None, *x.shape[2:])
    return pl.BlockSpec(shape, lambda b, n, t, s: (b, n, 0, 0))

  def tokens(width):
    shape = (None, None, rows, width)
    return pl.BlockSpec(shape, lambda b, n, t, s: (b, n, t, 0))

  gate = pl.BlockSpec(
    (None, None, None, 1, rows), lambda b, n, t, s: (b, n, s, 0, t)
  )
  return pl.pallas_call(
    functools.partial(_fwd_kernel, forward, config.chunk),
    name="memcache_mlp_memory_read",
    grid=(b, n, t // rows, count),
    in_specs=[
      tokens(k),
      gate,
      jax.tree.map(stored, networks),
      jax.tree.map(shared, static),
    ],
    out_specs=tokens(width),
    out_shape=like(q, b, n, t, width),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=config.vmem_limit_bytes,
    ),
    interpret=interpret,
  )(q, gates, networks, static)


def _fwd_kernel(forward, chunk, q, gates, network, static, y):
  place = pl.program_id(3)

  @pl.loop(0, q.shape[0] // chunk)
  def _(i):
    rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
    x = q[rows].astype(jnp.float32)
    out = read(forward, q.dtype, network, static, x)
    out *= column(gates[:, rows], out.shape[1])

    @pl.when(place == 0)
    def _():
      y[rows] = out

    @pl.when(place > 0)
    def _():
      y[rows] += out


def column(row, width):
  """[1 c] -> [c width]; c is a multiple of 128."""
  return wide(jnp.broadcast_to(row, (_LANES, row.shape[1])).T, width)
