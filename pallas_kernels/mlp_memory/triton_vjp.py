"""Gated reads of stored networks on a GPU: gradients.

A program goes along the networks with a block of tokens, as in the forward
pass, and writes the gradients of what each last map returned, which those of
weights are made of: sums over tokens, in programs for some columns of the
hidden layer of one network.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.operands import like
from ..linear_attention.tiles import Span, along, dot, load, store, wait, whole
from .config import TritonConfig
from .network import Arrays, bias_name
from .triton import (
  Network,
  Plan,
  Tokens,
  after_last,
  block_of,
  block_of_tokens,
  blocks,
  count,
  first_maps,
  gates,
  hidden,
  last_map,
  sides_of,
  tokens_at,
  weights_of,
)


def bwd(
  network: Network,
  q: jax.Array,
  networks: Arrays,
  static: Arrays,
  weights: jax.Array,
  d_y: jax.Array,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> tuple[jax.Array, Arrays, Arrays, jax.Array]:
  """Gradients of queries, networks, static parameters and gates.

  Meanwhile there is a gradient [b s n t v], in the dtype of q: give it few
  networks at a time.

  Args:
    network: as in the forward pass.
    q: as in the forward pass.
    networks: as in the forward pass.
    static: as in the forward pass.
    weights: as in the forward pass.
    d_y: gradient of the reads [b t n v], in the dtype of q.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    One gradient per operand, of its shape, float32.
  """
  b, t, n, _ = q.shape
  slots, width = weights.shape[3], network.widths[2]
  plan = Plan(network, config, interpret)
  programs = pl.cdiv(t, config.rows)
  arrays = {"q": q, "networks": networks, "static": static}
  d = plan.call(
    _read_kernel,
    "read_networks_read_vjp",
    (programs, 1, n, b),
    {**arrays, "weights": weights, "d_y": d_y},
    {
      "q": like(q, *q.shape),
      "weights": like(q, *weights.shape),
      "last": like(q, b, slots, n, t, width, dtype=q.dtype),
      "parts": {
        name: like(q, programs, *x.shape) for name, x in static.items()
      },
    },
  )
  d_networks = plan.call(
    _networks_kernel,
    "read_networks_networks_vjp",
    (blocks(plan), slots, n, b),
    {**arrays, "last": d["last"]},
    {"networks": {name: like(q, *x.shape) for name, x in networks.items()}},
  )["networks"]
  d_static = {name: jnp.sum(x, 0) for name, x in d["parts"].items()}
  return d["q"], d_networks, d_static, d["weights"]


def _read_kernel(x, out, *, plan: Plan):
  key, _, value = plan.network.widths
  inner, columns = whole(key), whole(value)
  rows = block_of_tokens(x, pl.program_id(0), plan)
  tokens = tokens_at(x, rows, plan)
  d_y = load(x["d_y"], rows, columns).astype(jnp.float32)

  def visit(i, sums):
    d_q, d_static = sums
    last = Kept(out["last"], (i, rows))
    d = pull(x, i, tokens, gates(x, rows, i), d_y, d_q, last, plan)
    store(out["weights"], d.gates, rows, i)
    return d.queries, jax.tree.map(jnp.add, d_static, d.static)

  d_q = jnp.zeros((rows.size, inner.size), jnp.float32)
  d_static = jax.tree.map(jnp.zeros_like, tokens.static)
  d_q, d_static = jax.lax.fori_loop(0, count(x), visit, (d_q, d_static))
  store(out["q"], d_q, rows, inner)
  for name, d in d_static.items():
    store(out["parts"][name], jnp.sum(d, 0), 0, columns)


class Kept(NamedTuple):
  """Gradients of what a last map returned, in main memory.

  Attributes:
    ref: where, in the dtype of queries.
    at: index of those of a program's tokens.
  """

  ref: Any
  at: tuple[Any, ...]

  def load(self, columns: Span) -> jax.Array:
    return load(self.ref, *self.at, columns)

  def store(self, d: jax.Array, plan: Plan) -> None:
    store(self.ref, d, *self.at, whole(plan.network.widths[2]))
    wait(plan.interpret)  # other threads will load it


class Pulled(NamedTuple):
  """Gradients of a gated read of one network.

  Attributes:
    queries: [c k], added to those before.
    gates: [c].
    static: of static parameters [1 v].
  """

  queries: jax.Array
  gates: jax.Array
  static: dict[str, jax.Array]


def pull(x, i, tokens: Tokens, gate, d_y, d_q, kept: Kept, plan: Plan):
  """Gradients of the read of network i, of that of its output.

  That of what the last map returned is put where it is to be kept.
  """

  def run(last, inputs, static):
    here = tokens._replace(queries=inputs, static=static)
    return after_last(last, here, plan)

  last = last_map(x, i, tokens, plan)
  read, back = jax.vjp(run, last, tokens.inputs, tokens.static)
  d_gates = jnp.sum(read * d_y, 1)
  d_last, d_inputs, d_static = back(gate * d_y)
  kept.store(d_last, plan)
  d_q = _to_inputs(x, i, tokens, kept, d_q + d_inputs, plan)
  return Pulled(d_q, d_gates, d_static)


def _to_inputs(x, i, tokens: Tokens, d_last: Kept, d_q, plan: Plan):
  """Adds to the gradient of queries what comes through the maps."""
  inner = whole(plan.network.widths[0])
  dtype = tokens.queries.dtype
  if not plan.network.first:
    return _before_last(x, i, d_last, inner, d_q, plan)

  def add(j, d_q):
    block = block_of(j, plan)
    _, d_before = _hidden_vjp(x, i, tokens, d_last, block, plan)
    for name, d in d_before.items():
      weight = weights_of(x, name, i, inner, block, dtype)
      d_q += dot(d.astype(dtype), weight, (1, 1), plan.interpret)
    return d_q

  return jax.lax.fori_loop(0, blocks(plan), add, d_q)


def _hidden_vjp(x, i, tokens: Tokens, d_last: Kept, block, plan: Plan):
  """Some columns of the last map's input, and gradients before them."""
  value, pull = jax.vjp(
    lambda before: hidden(before, tokens, plan),
    first_maps(x, i, tokens, block, plan),
  )
  zeros = jnp.zeros((len(tokens.queries), block.size), jnp.float32)
  [d_before] = pull(_before_last(x, i, d_last, block, zeros, plan))
  return value, d_before


def _before_last(x, i, d_last: Kept, block, total, plan: Plan):
  """Adds gradients of some columns of the last map's input."""

  def through(here):
    d = d_last.load(here)
    weight = weights_of(x, plan.network.last, i, block, here, d.dtype)
    return dot(d, weight, (1, 1), plan.interpret)

  return along(through, total, plan.network.widths[2], plan.config.inner)


def _networks_kernel(x, out, *, plan: Plan):
  block, i = block_of(pl.program_id(0), plan), pl.program_id(1)

  def step(j, sums):
    rows = block_of_tokens(x, j, plan)
    d_last = Kept(x["last"], (i, rows))
    return add_tokens(x, i, rows, d_last, sums, block, plan)

  steps = pl.cdiv(x["q"].shape[0], plan.config.rows)
  sums = jax.lax.fori_loop(0, steps, step, zeros(x, block, plan))
  store_sums(x, out, sums, i, block, plan)


def zeros(x, block: Span, plan: Plan) -> Arrays:
  """Sums for the gradient of a network, of some columns of its hidden layer."""
  return {
    name: jnp.zeros([side.size for side in sides], jnp.float32)
    for name, sides in sides_of(x["networks"], block, plan).items()
  }


def add_tokens(x, i, rows, d_last: Kept, sums, block: Span, plan: Plan):
  """Adds what tokens make of the gradient of what network i's last map does."""
  sums, dtype = dict(sums), x["q"].dtype

  def add(name, left, d):
    sums[name] += dot(left, d.astype(dtype), (0, 0), plan.interpret)
    if bias_name(name) in sums:
      sums[bias_name(name)] += jnp.sum(d.astype(jnp.float32), 0)

  if plan.network.first:
    tokens = tokens_at(x, rows, plan)
    left, d_before = _hidden_vjp(x, i, tokens, d_last, block, plan)
    for name, d in d_before.items():
      add(name, tokens.queries, d)
  else:
    left = load(x["q"], rows, block)
  d = d_last.load(whole(plan.network.widths[2]))
  add(plan.network.last, left.astype(dtype), d)
  return sums


def store_sums(x, out, sums: Arrays, i, block: Span, plan: Plan) -> None:
  """Stores the gradient of network i, of some columns of its hidden layer."""
  for name, sides in sides_of(x["networks"], block, plan).items():
    write = functools.partial(
      store, out["networks"][name], sums[name], i, *sides
    )
    if name == bias_name(plan.network.last):
      pl.when(block.start == 0)(write)  # the same for all columns
    else:
      write()
