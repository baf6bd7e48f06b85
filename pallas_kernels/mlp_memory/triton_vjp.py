"""Gated reads of stored networks on a GPU: gradients.

A program goes along the networks with a block of tokens, as in the forward
pass, and writes the gradients of what each last map returned, which those of
weights are made of: sums over tokens, in programs for some columns of the
hidden layer of one network.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.operands import like
from ..linear_attention.tiles import dot, load, part, store, whole
from .config import TritonConfig
from .network import Arrays, bias_name
from .triton import (
  Network,
  Plan,
  Tokens,
  after_last,
  block_of,
  blocks,
  count,
  first_maps,
  gates,
  hidden,
  last_map,
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
  plan = Plan(network, t, config, interpret)
  programs = pl.cdiv(t, config.rows)
  arrays = {"q": q, "networks": networks, "static": static}
  d = plan.call(
    _read_kernel,
    "read_vjp",
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
  outputs = {
    name: like(q, *x.shape)
    for name, x in networks.items()
    if name != bias_name(network.last)
  }
  d_networks = plan.call(
    _networks_kernel,
    "networks_vjp",
    (blocks(plan), slots, n, b),
    {**arrays, "last": d["last"]},
    {"networks": outputs},
  )["networks"]
  if bias_name(network.last) in networks:
    d_last = jnp.sum(d["last"].astype(jnp.float32), 3)
    d_networks[bias_name(network.last)] = d_last
  d_static = {name: jnp.sum(x, 0) for name, x in d["parts"].items()}
  return d["q"], d_networks, d_static, d["weights"]


def _read_kernel(x, out, *, plan: Plan):
  key, _, value = plan.network.widths
  inner, columns = whole(key), whole(value)
  rows = part(pl.program_id(0), plan.config.rows, plan.tokens)
  tokens = tokens_at(x, rows, plan)
  d_y = load(x["d_y"], rows, columns).astype(jnp.float32)

  def visit(i, totals):
    d_q, d_static = totals

    def run(last, inputs, static):
      here = tokens._replace(queries=inputs, static=static)
      return after_last(last, here, plan)

    last = last_map(x, i, tokens, plan)
    read, pull = jax.vjp(run, last, tokens.inputs, tokens.static)
    store(out["weights"], jnp.sum(read * d_y, 1), rows, i)
    d_last, d_inputs, more = pull(gates(x, rows, i) * d_y)
    d_last = d_last.astype(tokens.queries.dtype)
    store(out["last"], d_last, i, rows, columns)
    d_static = jax.tree.map(jnp.add, d_static, more)
    return _to_inputs(x, i, tokens, d_last, d_q + d_inputs, plan), d_static

  d_q = jnp.zeros((rows.size, inner.size), jnp.float32)
  d_static = jax.tree.map(jnp.zeros_like, tokens.static)
  d_q, d_static = jax.lax.fori_loop(0, count(x), visit, (d_q, d_static))
  store(out["q"], d_q, rows, inner)
  for name, d in d_static.items():
    store(out["parts"][name], jnp.sum(d, 0), 0, columns)


def _to_inputs(x, i, tokens: Tokens, d_last, d_q, plan: Plan):
  """Adds to the gradient of queries what comes through the maps."""
  key, _, value = plan.network.widths
  inner, columns = whole(key), whole(value)
  dtype = d_last.dtype
  if not plan.network.first:
    weight = weights_of(x, plan.network.last, i, inner, columns, dtype)
    return d_q + dot(d_last, weight, (1, 1), plan.interpret)

  def add(j, d_q):
    block = block_of(j, plan)
    _, d_before = _hidden_vjp(x, i, tokens, d_last, block, plan)
    for name, d in d_before.items():
      weight = weights_of(x, name, i, inner, block, dtype)
      d_q += dot(d.astype(dtype), weight, (1, 1), plan.interpret)
    return d_q

  return jax.lax.fori_loop(0, blocks(plan), add, d_q)


def _hidden_vjp(x, i, tokens: Tokens, d_last, block, plan: Plan):
  """Some columns of the last map's input, and gradients before them."""
  weight = weights_of(
    *(x, plan.network.last, i, block),
    *(whole(plan.network.widths[2]), d_last.dtype),
  )
  value, pull = jax.vjp(
    lambda before: hidden(before, tokens, plan),
    first_maps(x, i, tokens, block, plan),
  )
  [d_before] = pull(dot(d_last, weight, (1, 1), plan.interpret))
  return value, d_before


def _networks_kernel(x, out, *, plan: Plan):
  key, _, value = plan.network.widths
  inner, columns, last = whole(key), whole(value), plan.network.last
  block, i = block_of(pl.program_id(0), plan), pl.program_id(1)
  sums = {
    name: jnp.zeros(shape, jnp.float32)
    for name, shape in _shapes(x, block, plan).items()
  }

  def step(j, sums):
    rows = part(j, plan.config.rows, plan.tokens)
    d_last = load(x["last"], i, rows, columns)
    sums, dtype = dict(sums), d_last.dtype
    if plan.network.first:
      tokens = tokens_at(x, rows, plan)
      left, d_before = _hidden_vjp(x, i, tokens, d_last, block, plan)
      left = left.astype(dtype)
      for name, d in d_before.items():
        sums[name] += dot(
          tokens.queries, d.astype(dtype), (0, 0), plan.interpret
        )
        if bias_name(name) in sums:
          sums[bias_name(name)] += jnp.sum(d, 0)
    else:
      left = load(x["q"], rows, block)
    sums[last] += dot(left, d_last, (0, 0), plan.interpret)
    return sums

  steps = pl.cdiv(plan.tokens, plan.config.rows)
  sums = jax.lax.fori_loop(0, steps, step, sums)
  store(out["networks"][last], sums.pop(last), i, block, columns)
  for name, total in sums.items():
    where = (block,) if total.ndim == 1 else (inner, block)
    store(out["networks"][name], total, i, *where)


def _shapes(x, block, plan: Plan) -> dict[str, tuple[int, ...]]:
  """Of the sums of a program."""
  key, _, value = plan.network.widths
  shapes: dict[str, tuple[int, ...]] = {
    plan.network.last: (block.size, whole(value).size)
  }
  for name in plan.network.first:
    shapes[name] = (whole(key).size, block.size)
    if bias_name(name) in x["networks"]:
      shapes[bias_name(name)] = (block.size,)
  return shapes
