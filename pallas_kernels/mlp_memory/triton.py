"""Gated reads of stored networks on a GPU: the forward pass.

A program sends a block of tokens of one head through all networks, one after
the other, and adds up what they return in registers. Of a hidden layer it
computes some columns at a time, which go through the last map at once: so no
layer is written to main memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.operands import like
from ..linear_attention.tiles import (
  Span,
  along,
  call,
  dot,
  load,
  part,
  store,
  whole,
)
from .config import TritonConfig
from .network import Arrays, Forward, bias_name


class Network(NamedTuple):
  """A network of one hidden layer, or of none.

  What stands before its last map works on each number of the hidden layer
  alone.

  Attributes:
    forward: the network, see there.
    first: maps of its input, all to the width of the hidden layer; none where
      there is no such layer.
    last: the map to its output.
    widths: of input, hidden layer (0 where there is none) and output.
  """

  forward: Forward
  first: tuple[str, ...]
  last: str
  widths: tuple[int, int, int]


class Plan(NamedTuple):
  """What a kernel knows about its call.

  Attributes:
    network: what is read.
    config: the pieces.
    interpret: run without a GPU.
  """

  network: Network
  config: TritonConfig
  interpret: bool

  def call(self, kernel, name, grid, arrays, outputs):
    """Runs a kernel of dicts of references, or of dicts of them."""
    return call(
      *(functools.partial(kernel, plan=self), f"memcache_{name}", grid),
      *(arrays, outputs),
      config=self.config,
      interpret=self.interpret,
    )


def fwd(
  network: Network,
  q: jax.Array,
  networks: Arrays,
  static: Arrays,
  weights: jax.Array,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> jax.Array:
  """Gated reads of all tokens.

  Args:
    network: what is read.
    q: queries [b t n k].
    networks: weights of each map, by its name [b s n i o] float32, and its
      bias, if it has one [b s n o] float32.
    static: parameters that all networks share [b 1 n v] float32.
    weights: gates [b t n s].
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    y [b t n v] float32.
  """
  b, t, n, _ = q.shape
  plan = Plan(network, config, interpret)
  return plan.call(
    _read_kernel,
    "read_networks_read",
    (pl.cdiv(t, config.rows), 1, n, b),
    {"q": q, "networks": networks, "static": static, "weights": weights},
    {"y": like(q, b, t, n, network.widths[2])},
  )["y"]


class Tokens(NamedTuple):
  """Of a program.

  Attributes:
    at: where they are, the index of their rows; a span or `Places` is the last.
    queries: [c k].
    static: what networks need besides their maps [1 v].
  """

  at: tuple[Any, ...]
  queries: jax.Array
  static: dict[str, jax.Array]

  @property
  def inputs(self) -> jax.Array:
    return self.queries.astype(jnp.float32)


def tokens_at(x, rows, plan: Plan) -> Tokens:
  queries = load(x["q"], rows, whole(plan.network.widths[0]))
  return Tokens((rows,), queries, static_of(x, plan))


def static_of(x, plan: Plan) -> dict[str, jax.Array]:
  columns = whole(plan.network.widths[2])
  return {
    name: load(ref, 0, columns)[None] for name, ref in x["static"].items()
  }


def _read_kernel(x, out, *, plan: Plan):
  columns = whole(plan.network.widths[2])
  rows = block_of_tokens(x, pl.program_id(0), plan)
  tokens = tokens_at(x, rows, plan)

  def visit(i, total):
    read = after_last(last_map(x, i, tokens, plan), tokens, plan)
    return total + gates(x, rows, i) * read

  total = jnp.zeros((rows.size, columns.size), jnp.float32)
  total = jax.lax.fori_loop(0, count(x), visit, total)
  store(out["y"], total, rows, columns)


def block_of_tokens(x, j, plan: Plan) -> Span:
  return part(j, plan.config.rows, x["q"].shape[0])


def count(x) -> int:
  """Of networks; the last axis of gates is filled up."""
  return jax.tree.leaves(x["networks"])[0].shape[0]


def gates(x, rows, i):
  """Those of tokens for one network [c 1]."""
  return load(x["weights"], rows, i).astype(jnp.float32)[:, None]


def last_map(x, i, tokens: Tokens, plan: Plan) -> jax.Array:
  """What the last map of network i returns [c v]."""
  last, columns = plan.network.last, whole(plan.network.widths[2])

  def add(j, total):
    block = block_of(j, plan)
    if plan.network.first:
      before = first_maps(x, i, tokens, block, plan)
      left = hidden(before, tokens, plan).astype(tokens.queries.dtype)
    else:
      left = load(x["q"], *tokens.at, block)
    weight = weights_of(x, last, i, block, columns, left.dtype)
    return total + dot(left, weight, (1, 0), plan.interpret)

  total = jnp.zeros((len(tokens.queries), columns.size), jnp.float32)
  total = jax.lax.fori_loop(0, blocks(plan), add, total)
  return total + _bias(x, last, i, columns)


def blocks(plan: Plan) -> int:
  """In which the hidden layer, or else the input, is cut."""
  return pl.cdiv(_cut(plan), plan.config.columns)


def block_of(j, plan: Plan) -> Span:
  return part(j, plan.config.columns, _cut(plan))


def _cut(plan: Plan) -> int:
  key, between, _ = plan.network.widths
  return between if plan.network.first else key


def sides_of(names, block: Span, plan: Plan) -> dict[str, tuple[Span, ...]]:
  """Of each array of a network, what belongs to a block."""
  inner, columns = whole(plan.network.widths[0]), whole(plan.network.widths[2])
  sides = {name: (inner, block) for name in plan.network.first}
  sides |= {bias_name(name): (block,) for name in plan.network.first}
  sides[plan.network.last] = (block, columns)
  sides[bias_name(plan.network.last)] = (columns,)
  return {name: sides[name] for name in names}


def first_maps(x, i, tokens: Tokens, block: Span, plan: Plan):
  """What the first maps of network i return, by name: some columns [c h]."""
  key, names = plan.network.widths[0], plan.network.first
  dtype = tokens.queries.dtype

  def affine(here):
    queries = load(x["q"], *tokens.at, here)
    weights = [weights_of(x, name, i, here, block, dtype) for name in names]
    return [dot(queries, w, (1, 0), plan.interpret) for w in weights]

  zeros = jnp.zeros((len(tokens.queries), block.size), jnp.float32)
  out = along(affine, [zeros] * len(names), key, plan.config.inner)
  return {
    name: y + _bias(x, name, i, block)
    for name, y in zip(names, out, strict=True)
  }


def weights_of(x, name, i, rows: Span, columns: Span, dtype) -> jax.Array:
  return load(x["networks"][name], i, rows, columns).astype(dtype)


def _bias(x, name, i, columns: Span) -> Any:
  bias = x["networks"].get(bias_name(name))
  return 0.0 if bias is None else load(bias, i, columns)[None]


def hidden(before, tokens: Tokens, plan: Plan) -> jax.Array:
  """Some columns of the last map's input, of those of the first maps."""
  found = []

  def affine(name, value):
    if name != plan.network.last:
      return before[name]
    found.append(value)
    return _nothing(value)

  # Nobody uses what it returns: the compiler leaves that out.
  plan.network.forward(affine, tokens.static, tokens.inputs)
  return found[0]


def after_last(last, tokens: Tokens, plan: Plan) -> jax.Array:
  """What a network returns [c v], of what its last map does."""

  def affine(name, _):
    return last if name == plan.network.last else _nothing(last)

  return plan.network.forward(affine, tokens.static, tokens.inputs)


def _nothing(x):
  return jnp.zeros((x.shape[0], 1), jnp.float32)
