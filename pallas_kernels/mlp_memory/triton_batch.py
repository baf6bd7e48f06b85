"""One inner batch of one head on a GPU: reads, and the weights after it.

Weights and momentum lie in main memory, so that the GPU's cache holds them, and
are gone through in blocks of the hidden layer, twice: for what the network
returns of keys, of which the derivative of the loss comes; and for all the
rest. Registers hold a block at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.tiles import (
  Span,
  along,
  dot,
  load,
  part,
  store,
  wait,
  whole,
)
from . import triton
from .batches import FULL, USED
from .network import bias_name
from .triton import Tokens


class Memory(NamedTuple):
  """What is trained.

  Attributes:
    network: what a memory is.
    loss_gradient: derivative of the inner loss, of the output and the value.
    restarts: weights count from the start of the batch.
  """

  network: triton.Network
  loss_gradient: Callable[..., jax.Array]
  restarts: bool


class Plan(NamedTuple):
  """What the kernel knows about its call.

  Attributes:
    memory: what is trained.
    reading: what reads of its network know.
    rows: of a batch, that are read.
    columns: those that are written.
    batches: of the call.
  """

  memory: Memory
  reading: triton.Plan
  rows: Span
  columns: Span
  batches: int

  @property
  def value(self) -> Span:
    return whole(self.memory.network.widths[2])

  def dot(self, a, b, *contract):
    return dot(a, b, contract, self.reading.interpret)

  def wait(self) -> None:
    wait(self.reading.interpret)


class Batch(NamedTuple):
  """Of one head, with references to what is in main memory.

  Attributes:
    of_call: tokens and coefficients of all batches.
    now: weights and momentum, see `Operands.carry`.
    g: which batch it is.
    marks: its bits.
    keys: of the tokens that it writes.
    queries: of those that read.
    plan: of the call.
  """

  of_call: dict[str, Any]
  now: dict[str, Any]
  g: Any
  marks: Any
  keys: Tokens
  queries: Tokens
  plan: Plan

  @property
  def dtype(self):
    return self.of_call["k"].dtype

  @property
  def start(self):
    """Weights that gradients are taken at."""
    return self.now.get("start", self.now["theta"])

  @property
  def base(self):
    """Weights that steps are added to."""
    return self.start if self.plan.memory.restarts else self.now["theta"]

  @property
  def before(self):
    """What rows read besides steps, and how much of it: [1] or [r 1]."""
    rows = self.plan.rows
    decay, carry = self.number("decay", rows), self.number("carry", rows)
    terms = [(self.base, 1.0 if decay is None else decay[:, None])]
    if "momentum" in self.now:
      terms.append((self.now["momentum"], carry[:, None]))
    return terms

  def number(self, name, *sides) -> Any:
    """A coefficient, see `Operands`; None where there is none."""
    ref = self.of_call.get(name)
    return None if ref is None else load(ref, self.g, *sides)

  def keys_at(self, here: Span):
    return load(self.of_call["k"], *self.keys.at, here)

  def queries_at(self, here: Span):
    return load(self.of_call["q"], *self.queries.at, here)

  def operand(self, weights, name, *sides):
    return load(weights[name], 0, *sides).astype(self.dtype)

  def first_maps(self, name, weights, here: Span):
    """What they return of tokens of a name, by map: a block."""
    tokens = {"q": self.queries, "k": self.keys}[name]
    x = {"q": self.of_call[name], "networks": weights}
    return triton.first_maps(x, 0, tokens, here, self.plan.reading)


def batch_of(x, now, g, marks, plan: Plan) -> Batch:
  static = triton.static_of(x, plan.reading)
  key = whole(plan.memory.network.widths[0])

  def tokens(name, rows):
    return Tokens((g, rows), load(x["blocks"][name], g, rows, key), static)

  keys, queries = tokens("k", plan.columns), tokens("q", plan.rows)
  return Batch(x["blocks"], now, g, marks, keys, queries, plan)


def run(batch: Batch) -> jax.Array:
  """Trains the network, and returns what rows read [r v]."""
  plan, network = batch.plan, batch.plan.memory.network
  descent = _descent(batch)
  before = batch.before
  pairs = _pairs(batch) if network.first else None

  def block(j, sums):
    here = triton.block_of(j, plan.reading)
    out, last_pairs = sums
    inputs, z, of_first = _hidden(batch, here, pairs, descent)
    for weights, factor in before:
      weight = batch.operand(weights, network.last, here, plan.value)
      out += factor * plan.dot(z, weight, 1, 0)
    last_pairs += plan.dot(z, inputs, 1, 1)
    for name, d in of_first.items():
      _write_first(batch, name, here, d)
    _write_map(batch, network.last, (here, plan.value), inputs, descent)
    return out, last_pairs

  rows, columns = plan.rows.size, plan.columns.size
  sums = (
    jnp.zeros((rows, plan.value.size), jnp.float32),
    jnp.zeros((rows, columns), jnp.float32),
  )
  out, pairs = jax.lax.fori_loop(0, triton.blocks(plan.reading), block, sums)
  out += _written(batch, network.last, pairs, descent)
  bias = bias_name(network.last)
  if bias in batch.base:
    for weights, factor in before:
      out += factor * load(weights[bias], 0, plan.value)[None]
  _write_bias(batch, network.last, plan.value, descent)
  return triton.after_last(out, batch.queries, plan.reading)


def _descent(batch: Batch) -> jax.Array:
  """How the loss falls with what the last map returns of keys [e v]."""
  plan, keys = batch.plan, batch.keys
  x = {"q": batch.of_call["k"], "networks": batch.start}
  output, pull = jax.vjp(
    lambda last: triton.after_last(last, keys, plan.reading),
    triton.last_map(x, 0, keys, plan.reading),
  )
  value = load(batch.of_call["v"], batch.g, plan.columns, plan.value)
  d = plan.memory.loss_gradient(output, value.astype(jnp.float32))
  [descent] = pull(-d)
  return descent


def _pairs(batch: Batch) -> jax.Array:
  """Products of queries and keys [r e]."""
  plan = batch.plan

  def product(here):
    return plan.dot(batch.queries_at(here), batch.keys_at(here), 1, 1)

  zeros = jnp.zeros((plan.rows.size, plan.columns.size), jnp.float32)
  config, width = plan.reading.config, plan.memory.network.widths[0]
  return along(product, zeros, width, config.inner)


def _hidden(batch: Batch, here: Span, pairs, descent):
  """A block of the last map's input.

  Returns:
    That of keys [e h] and of queries [r h], as operands; and how the loss falls
    with what each of the first maps returns of keys [e h].
  """
  plan, network = batch.plan, batch.plan.memory.network
  if not network.first:
    return batch.keys_at(here), batch.queries_at(here), {}
  inputs, pull = jax.vjp(
    lambda before: triton.hidden(before, batch.keys, plan.reading),
    batch.first_maps("k", batch.start, here),
  )
  weight = batch.operand(batch.start, network.last, here, plan.value)
  [d] = pull(plan.dot(descent.astype(batch.dtype), weight, 1, 1))
  z = {name: _written(batch, name, pairs, d[name]) for name in network.first}
  for weights, factor in batch.before:
    read = batch.first_maps("q", weights, here)
    z = {name: z[name] + factor * read[name] for name in network.first}
  z = triton.hidden(z, batch.queries, plan.reading)
  return inputs.astype(batch.dtype), z.astype(batch.dtype), d


def _written(batch: Batch, name, pairs, descent) -> jax.Array:
  """What rows read of the steps of their own batch; see the op's `_pieces`."""
  plan = batch.plan
  if bias_name(name) in batch.base:  # its input is 1
    pairs = pairs + 1.0
  pairs = pairs * batch.number("write", plan.rows, plan.columns)
  return plan.dot(
    *(pairs.astype(batch.dtype), descent.astype(batch.dtype), 1, 0)
  )


def _write_first(batch: Batch, name, here: Span, descent) -> None:
  """A block of a map of keys, and of its bias."""
  width = batch.plan.memory.network.widths[0]
  size = min(batch.plan.reading.config.inner, whole(width).size)

  def piece(i, nothing):
    inner = part(i, size, width)
    _write_map(batch, name, (inner, here), batch.keys_at(inner), descent)
    return nothing

  jax.lax.fori_loop(0, pl.cdiv(width, size), piece, 0)
  _write_bias(batch, name, here, descent)


def _write_map(batch: Batch, name, sides, inputs, descent) -> None:
  def written(steps):
    return batch.plan.dot(inputs, steps.astype(batch.dtype), 0, 0)

  _write(batch, name, sides, written, descent)


def _write_bias(batch: Batch, name, columns: Span, descent) -> None:
  if bias_name(name) in batch.base:
    sums = lambda steps: jnp.sum(steps, 0)
    _write(batch, bias_name(name), (columns,), sums, descent)


def _write(batch: Batch, name, sides, written, descent) -> None:
  """What is carried of a tile, after the batch."""
  now, plan, at = batch.now, batch.plan, (0, *sides)

  def sums(weight):
    return written(batch.number(weight, plan.columns)[:, None] * descent)

  theta, decay = load(batch.base[name], *at), batch.number("end_decay")
  theta = sums("last") + (theta if decay is None else decay * theta)
  new = {}
  if "momentum" in now:
    momentum = load(now["momentum"][name], *at)
    theta += batch.number("end_carry") * momentum
    kept = batch.number("momentum_decay") * momentum
    new["momentum"] = kept + sums("momentum_write")
  if "start" in now and plan.memory.restarts:
    # What has no tokens writes nothing.
    used = batch.marks & USED != 0
    theta = jnp.where(used, theta, load(now["theta"][name], *at))
  # Other threads may have yet to load what is overwritten.
  plan.wait()
  for kind, x in (new | {"theta": theta}).items():
    store(now[kind][name], x, *at)
  if "start" in now:
    full = batch.marks & FULL != 0
    pl.when(full)(lambda: store(now["start"][name], theta, *at))
