"""Reads of a few selected states per token, on a GPU, and their gradients.

A pair of a token and a state that it selected has a place in a tile, and all
places of a tile read one state. A program takes one tile: it gathers the rows
of its tokens and writes what they read at its pairs, token by token, where it
is left to add up what is of one token. Gradients of queries and gates are
found in the same way; those of a state are sums over its tiles, which follow
each other.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.operands import like
from ..linear_attention.tiles import (
  Places,
  Span,
  call,
  dot,
  load,
  part,
  store,
  whole,
)
from .config import SelectedTritonConfig


class Tiles(NamedTuple):
  """Where pairs have their places: p tiles of c places.

  Attributes:
    state: that each tile reads [b p n].
    pair: at each place [b (p c) n], numbered token by token, r of each; -1
      where there is none, which is behind the others of the tile.
    first: tile of each state, and the one after its last, which is the next
      state's first [b s+1 n].
  """

  state: jax.Array
  pair: jax.Array
  first: jax.Array


class Plan(NamedTuple):
  """What a kernel knows about its call.

  Attributes:
    widths: of keys and values.
    config: the pieces.
    interpret: run without a GPU.
  """

  widths: tuple[int, int]
  config: SelectedTritonConfig
  interpret: bool

  def columns(self, width: int) -> int:
    """That a program takes of keys, or of values."""
    return min(self.config.columns, pl.next_power_of_2(width))

  def parts(self, width: int) -> int:
    return pl.cdiv(width, self.columns(width))

  def call(self, kernel, name, grid, arrays, outputs):
    """Runs a kernel of dicts of references."""
    name = f"memcache_selected_read_{name}"
    return call(
      *(functools.partial(kernel, plan=self), name, grid, arrays, outputs),
      config=self.config,
      interpret=self.interpret,
    )


def fwd(
  q: jax.Array,
  states: jax.Array,
  weights: jax.Array,
  tiles: Tiles,
  *,
  config: SelectedTritonConfig,
  interpret: bool = False,
) -> jax.Array:
  """Gated reads of all pairs.

  Args:
    q: queries [b t n k].
    states: [b s n k v] float32.
    weights: gates of pairs [b (t r) n] float32.
    tiles: see there.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    [b (t r) n v] float32; anything at pairs without a place.
  """
  plan, arrays = _prepare(q, states, weights, tiles, config, interpret)
  b, pairs, n = weights.shape
  width = states.shape[-1]
  grid = (plan.parts(width), tiles.state.shape[1], n, b)
  return plan.call(
    *(_read_kernel, "read", grid),
    arrays,
    {"reads": like(q, b, pairs, n, width)},
  )["reads"]


def bwd(
  q: jax.Array,
  states: jax.Array,
  weights: jax.Array,
  tiles: Tiles,
  d_y: jax.Array,
  *,
  config: SelectedTritonConfig,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of queries, states and gates.

  Args:
    q: as in the forward pass.
    states: as in the forward pass.
    weights: as in the forward pass.
    tiles: as in the forward pass.
    d_y: gradient of the sums of all reads of a token [b t n v], in the dtype
      of q.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    Float32: what pairs add to those of queries [b (t r) n k], and those of
    gates [b (t r) n], anything at pairs without a place; those of states.
  """
  plan, arrays = _prepare(q, states, weights, tiles, config, interpret)
  arrays["d_y"] = d_y
  b, pairs, n = weights.shape
  k, v = plan.widths
  d = plan.call(
    _read_vjp_kernel,
    "read_vjp",
    (plan.parts(k), tiles.state.shape[1], n, b),
    arrays,
    {
      "q": like(q, b, pairs, n, k),
      "parts": like(q, plan.parts(k), b, pairs, n),
    },
  )
  del arrays["states"], arrays["state"]
  d_states = plan.call(
    _states_vjp_kernel,
    "states_vjp",
    (plan.parts(k) * plan.parts(v), states.shape[1], n, b),
    arrays,
    {"states": like(q, *states.shape)},
  )["states"]
  return d["q"], d_states, jnp.sum(d["parts"], 0)


def _prepare(q, states, weights, tiles: Tiles, config, interpret):
  widths = states.shape[-2], states.shape[-1]
  plan = Plan(widths, config, interpret)
  return plan, {"q": q, "states": states, "weights": weights} | tiles._asdict()


def tokens_and_pairs(x, tile, size: int) -> tuple[Places, Places]:
  """Those at the places of a tile of a size."""
  pair = load(x["pair"], Span(tile * size, size))
  of_token = x["weights"].shape[0] // x["q"].shape[0]
  token = jnp.where(pair < 0, -1, jax.lax.div(pair, of_token))
  return Places(token), Places(pair)


def for_used_tile(body, x, tile, size: int) -> None:
  """Calls it with tokens and pairs, unless there are none."""

  @pl.when(load(x["pair"], tile * size) >= 0)
  def _():
    body(*tokens_and_pairs(x, tile, size))


def _read_kernel(x, out, *, plan: Plan):
  tile, inner = pl.program_id(1), whole(plan.widths[0])
  width = plan.widths[1]
  columns = part(pl.program_id(0), plan.columns(width), width)

  def read(tokens, pairs):
    queries = load(x["q"], tokens, inner)
    state = load(x["states"], load(x["state"], tile), inner, columns)
    value = dot(queries, state.astype(queries.dtype), (1, 0), plan.interpret)
    gate = load(x["weights"], pairs)[:, None]
    store(out["reads"], gate * value, pairs, columns)

  for_used_tile(read, x, tile, plan.config.tile)


def _read_vjp_kernel(x, out, *, plan: Plan):
  tile, inner = pl.program_id(1), whole(plan.widths[1])
  width = plan.widths[0]
  columns = part(pl.program_id(0), plan.columns(width), width)

  def read(tokens, pairs):
    d_y = load(x["d_y"], tokens, inner)
    state = load(x["states"], load(x["state"], tile), columns, inner)
    back = dot(d_y, state.astype(d_y.dtype), (1, 1), plan.interpret)
    queries = load(x["q"], tokens, columns).astype(jnp.float32)
    store(out["parts"], jnp.sum(queries * back, 1), pairs)
    gate = load(x["weights"], pairs)[:, None]
    store(out["q"], gate * back, pairs, columns)

  for_used_tile(read, x, tile, plan.config.tile)


def _states_vjp_kernel(x, out, *, plan: Plan):
  k, v = plan.widths
  across, slot = plan.parts(v), pl.program_id(1)
  rows = part(pl.program_id(0) // across, plan.columns(k), k)
  columns = part(pl.program_id(0) % across, plan.columns(v), v)

  def add(tile, total):
    tokens, pairs = tokens_and_pairs(x, tile, plan.config.tile)
    queries = load(x["q"], tokens, rows)
    gated = load(x["weights"], pairs)[:, None] * queries.astype(jnp.float32)
    d_y = load(x["d_y"], tokens, columns)
    gated = gated.astype(queries.dtype)
    return total + dot(gated, d_y, (0, 0), plan.interpret)

  first, end = (load(x["first"], slot + i) for i in range(2))
  total = jnp.zeros((rows.size, columns.size), jnp.float32)
  total = jax.lax.fori_loop(first, end, add, total)
  store(out["states"], total, slot, rows, columns)
