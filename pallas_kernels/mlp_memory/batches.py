"""Inner batches of a network that is trained as it reads, on a TPU.

One step of the grid is one inner batch of one head: gradients at the weights
from its start, reads between its tokens, and the weights after it. Weights and
momentum stay in fast memory from the first batch to the last one.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..linear_attention.mosaic_tpu import dot, like
from .config import BatchesConfig
from .network import add_bias, bias_name, product

Arrays = dict[str, jax.Array]

# Bits of what is said about each batch of a row.
FRESH, FULL, USED = 1, 2, 4


class Network(NamedTuple):
  """What a memory is.

  Attributes:
    forward: the network, as a function of how an affine map is computed, given
      its name and input, of static parameters by name, and of its input.
    loss_gradient: derivative of the inner loss, of the output and the value.
    maps: widths of the input and the output of each map, by its name.
    restarts: weights count from the start of the batch.
  """

  forward: Callable[..., jax.Array]
  loss_gradient: Callable[..., jax.Array]
  maps: Mapping[str, tuple[int, int]]
  restarts: bool


class Places(NamedTuple):
  """Columns of the scalars of a batch that follow those of its tokens.

  Attributes:
    last: weight of each token's gradient after the batch.
    decay: of the weights before, for each row; None for 1.
    carry: of the momentum before, for each row; None without momentum.
    momentum_write: weight of each token's gradient in the momentum after.
    momentum_decay: of the momentum before, in every row.
    end: the row that is the last token.
  """

  last: int
  decay: int | None
  carry: int | None
  momentum_write: int | None
  momentum_decay: int | None
  end: int


class Operands(NamedTuple):
  """g batches, of r tokens that are read and e that are written.

  Attributes:
    marks: bits of each batch and row [g b].
    q: [g b n r k]; k: [g b n e k]; v: [g b n e v], of one dtype.
    scalars: how much each row reads of each token's gradient, and see
      `Places` [g b n max(r, e) x] float32.
    static: parameters that all rows share [n 1 x] float32.
    initial: weights that a document starts with, as in `carry`; None where
      none starts.
    carry: "theta", "momentum" and "start", those that there are: weights
      [b n i o] and biases [b n 1 o], named after the weight, float32.
  """

  marks: jax.Array
  q: jax.Array
  k: jax.Array
  v: jax.Array
  scalars: jax.Array
  static: Arrays
  initial: Arrays | None
  carry: dict[str, Arrays]


def fwd(
  network: Network,
  operands: Operands,
  places: Places,
  *,
  config: BatchesConfig,
  interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, dict[str, Arrays]]:
  """Reads of all tokens, and what is carried on.

  Args:
    network: the memory.
    operands: see there; r and e are multiples of 16.
    places: in the scalars.
    config: the pieces.
    interpret: run without a TPU.

  Returns:
    y [g b n r v] float32, and `Operands.carry` after the last batch.
  """
  q, v = operands.q, operands.v
  g, b, n, r, _ = q.shape

  def of_batch(x):
    shape = (None, None, None, *x.shape[3:])
    return pl.BlockSpec(shape, lambda b, n, g, *_: (g, b, n, 0, 0))

  def of_head(x):
    shape = (None, None, *x.shape[2:])
    return pl.BlockSpec(shape, lambda b, n, g, *_: (b, n, 0, 0))

  def shared(x):
    shape = (None, *x.shape[1:])
    return pl.BlockSpec(shape, lambda b, n, g, *_: (n, 0, 0))

  specs = [of_batch(x) for x in operands[1:5]]
  specs += [jax.tree.map(shared, operands.static)]
  specs += [jax.tree.map(of_head, x) for x in operands[6:]]
  y = like(q, g, b, n, r, v.shape[-1])
  return pl.pallas_call(
    functools.partial(_kernel, network, places),
    name="memcache_mlp_memory_batches",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(b, n, g),
      in_specs=specs,
      out_specs=(of_batch(y), specs[-1]),
    ),
    out_shape=(y, jax.tree.map(lambda x: like(q, *x.shape), operands.carry)),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=config.vmem_limit_bytes,
    ),
    interpret=interpret,
  )(*operands)


def _kernel(
  network, places, marks, q, k, v, scalars, static, initial, before, y, now
):
  row, batch = pl.program_id(0), pl.program_id(2)
  mark = marks[batch, row]

  @pl.when(batch == 0)
  def _():
    jax.tree.map(_copy, before, now)

  if initial is not None:

    @pl.when(mark & FRESH != 0)
    def _():
      _reset(initial, now)

  static = {name: x[...] for name, x in static.items()}
  scalars = _Scalars(scalars[...], places)
  start = now.get("start", now["theta"])
  x, d = _gradients(network, static, start, k[...], v[...])
  base = start if network.restarts else now["theta"]
  y[...] = network.forward(
    functools.partial(
      _read, scalars, base, now.get("momentum"), x, d, dtype=q.dtype
    ),
    static,
    q[...].astype(jnp.float32),
  )

  @pl.when(mark & USED != 0)
  def _():
    _write(scalars, base, now, x, d, q.dtype)

  if "start" in now:

    @pl.when(mark & FULL != 0)
    def _():
      jax.tree.map(_copy, now["theta"], now["start"])


def _copy(source, target):
  target[...] = source[...]


def _reset(initial, now):
  for name, x in now.items():
    if name == "momentum":
      for ref in x.values():
        ref[...] = jnp.zeros_like(ref)
    else:
      jax.tree.map(_copy, initial, x)


class _Scalars(NamedTuple):
  values: jax.Array
  places: Places

  def column(self, place, rows):
    return self.values[:rows, place : place + 1]

  def end(self, place):
    end = self.places.end
    return self.values[end : end + 1, place : place + 1]


def _gradients(network, static, weights, k, v):
  """Inputs of every map, and derivatives of the loss after it."""
  zeros = {
    name: jnp.zeros((k.shape[0], width), jnp.float32)
    for name, (_, width) in network.maps.items()
  }

  def predict(shift):
    inputs = {}

    def affine(name, x):
      inputs[name] = x
      out = product(x, weights[name][...].astype(k.dtype)) + shift[name]
      return add_bias(out, weights, name)

    return network.forward(affine, static, k.astype(jnp.float32)), inputs

  output, pull, inputs = jax.vjp(predict, zeros, has_aux=True)
  (d,) = pull(network.loss_gradient(output, v.astype(jnp.float32)))
  return inputs, d


def _read(scalars, base, momentum, x, d, name, z, *, dtype):
  """One map at every row's own weights; see the op's `_pieces`."""
  rows, columns = z.shape[0], x[name].shape[0]
  places, z = scalars.places, z.astype(dtype)
  through = lambda weights: add_bias(
    dot(z, weights[name][...].astype(dtype)), weights, name
  )
  out = through(base)
  if places.decay is not None:
    out *= scalars.column(places.decay, rows)
  if momentum is not None:
    out += scalars.column(places.carry, rows) * through(momentum)
  scores = dot(z, x[name].astype(dtype), (1, 1))
  if bias_name(name) in base:  # its input is 1
    scores += 1.0
  scores *= scalars.values[:rows, :columns]
  return out - dot(scores.astype(dtype), d[name].astype(dtype))


def _write(scalars, base, now, x, d, dtype):
  """Weights and momentum after the batch."""
  places = scalars.places
  momentum: Any = now.get("momentum")
  for name, inputs in x.items():
    columns = inputs.shape[0]
    inputs, bias = inputs.astype(dtype), bias_name(name)

    def sums(place, columns=columns, inputs=inputs, name=name, bias=bias):
      steps = scalars.column(place, columns) * d[name]
      written = {name: dot(inputs, steps.astype(dtype), (0, 0))}
      if bias in base:
        written[bias] = jnp.sum(steps, axis=0, keepdims=True)
      return written

    for key, written in sums(places.last).items():
      new = base[key][...]
      if places.decay is not None:
        new *= scalars.end(places.decay)
      if momentum is not None:
        new += scalars.end(places.carry) * momentum[key][...]
      now["theta"][key][...] = new - written
    if momentum is not None:
      for key, written in sums(places.momentum_write).items():
        kept = scalars.end(places.momentum_decay) * momentum[key][...]
        momentum[key][...] = kept - written
