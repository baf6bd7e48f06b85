"""Gated reads of stored networks on a TPU: the forward pass.

One step of the grid sends a block of tokens of one head through one network,
from which nothing but the gated output comes out of fast memory.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import dot, like, wide
from .config import Config

_LANES = 128

Arrays = dict[str, jax.Array]


def fwd(
  forward: Callable[..., jax.Array],
  q: jax.Array,
  weights: Arrays,
  biases: Arrays,
  static: Arrays,
  gates: jax.Array,
  *,
  width: int,
  config: Config,
  interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
  """Gated reads of all tokens.

  Args:
    forward: the network, as a function of how an affine map is computed, given
      its name and input, of static parameters by name, and of its input.
    q: queries [b n t k]; t is a multiple of `config.rows`.
    weights: of each map, by its name [b s n i o] float32.
    biases: of each map that has one [b s n 1 o] float32.
    static: parameters that all networks share [n 1 x] float32.
    gates: [b n s t] float32.
    width: of values.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [b n t v] float32.
  """
  b, n, t, k = q.shape
  networks, rows = gates.shape[2], config.rows

  def stored(x):
    shape = (None, None, None, *x.shape[3:])
    return pl.BlockSpec(shape, lambda b, n, t, s: (b, s, n, 0, 0))

  def shared(x):
    return pl.BlockSpec((None, *x.shape[1:]), lambda b, n, t, s: (n, 0, 0))

  def tokens(width):
    shape = (None, None, rows, width)
    return pl.BlockSpec(shape, lambda b, n, t, s: (b, n, t, 0))

  arrays = (weights, biases, static)
  return pl.pallas_call(
    functools.partial(_fwd_kernel, forward, config.chunk),
    name="memcache_mlp_memory_read",
    grid=(b, n, t // rows, networks),
    in_specs=[
      tokens(k),
      pl.BlockSpec(
        (None, None, networks, rows), lambda b, n, t, s: (b, n, 0, t)
      ),
      *(
        {name: spec(x) for name, x in group.items()}
        for group, spec in zip(arrays, (stored, stored, shared), strict=True)
      ),
    ],
    out_specs=tokens(width),
    out_shape=like(q, b, n, t, width),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=config.vmem_limit_bytes,
    ),
    interpret=interpret,
  )(q, gates, *arrays)


def _fwd_kernel(forward, chunk, q, gates, weights, biases, static, y):
  network = pl.program_id(3)
  static = {name: x[...] for name, x in static.items()}

  def affine(name, x):
    out = dot(x.astype(q.dtype), weights[name][...].astype(q.dtype))
    return out + biases[name][...] if name in biases else out

  @pl.loop(0, q.shape[0] // chunk)
  def _(i):
    rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
    read = forward(affine, static, q[rows].astype(jnp.float32))
    gate = jnp.broadcast_to(gates[pl.ds(network, 1), rows], (_LANES, chunk))
    read *= wide(gate.T, read.shape[1])

    @pl.when(network == 0)
    def _():
      y[rows] = read

    @pl.when(network > 0)
    def _():
      y[rows] += read
