"""The delta rule on a GPU: the forward pass.

The triangular matrices of all chunks are inverted first, each by a program of
its own. Then programs go along the chunks, with some columns of the memory in
registers: they write down the memory before each chunk, and what the chunk
writes. Reads need nothing else, and have programs of their own again.

Arrays are taken as the op has them, tokens before heads: nothing is copied.
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
  wait,
  whole,
)
from .config import TritonConfig
from .operands import (
  BETA,
  CARRY,
  END,
  FRESH,
  FRESH_END,
  KEEP,
  LOGS,
  RESETS,
  Operands,
)

_PREFIX = "memcache_delta_rule_"
# More would spill: products of float32 on several tiles of a matrix.
_SOLVE_WARPS = 4
# Of the width of keys, what one product with a memory takes; likewise.
_PIECE = 64


class Plan(NamedTuple):
  """What a kernel knows about its call.

  Attributes:
    tokens: of the call.
    widths: of keys and values.
    config: the pieces.
    interpret: run without a GPU.
  """

  tokens: int
  widths: tuple[int, int]
  config: TritonConfig
  interpret: bool

  @property
  def chunks(self) -> int:
    return pl.cdiv(self.tokens, self.config.chunk)

  def columns(self, width: int) -> int:
    """That a program takes of keys, or of values."""
    return min(self.config.columns, pl.next_power_of_2(width))

  @property
  def inner(self) -> list[Span]:
    """Pieces of the width of keys, in which registers have a memory."""
    width = self.widths[0]
    size = min(_PIECE, whole(width).size)
    return [part(i, size, width) for i in range(pl.cdiv(width, size))]

  @property
  def row(self) -> Span:
    """Of the inverse: a column for each token of the chunk."""
    return Span(0, self.config.chunk)

  def call(self, kernel, name, grid, arrays, outputs, warps=None):
    """Runs a kernel of dicts of references."""
    return call(
      *(functools.partial(kernel, plan=self), f"{_PREFIX}{name}"),
      *(grid, arrays, outputs),
      config=self.config,
      interpret=self.interpret,
      warps=warps,
    )


def fwd(
  operands: Operands, *, config: TritonConfig, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """Reads of all tokens, and the memory after the last one.

  Args:
    operands: see there, but with tokens before heads, of any number: scalars
      alone fill up the last chunk.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    y [b t n v] in the dtype of v, and the memory [b n k v] float32.
  """
  plan = plan_of(operands, config, interpret)
  kept = along_chunks(operands, plan)
  b, t, n, width = operands.v.shape
  arrays = {name: kept[name] for name in ("before", "written")} | operands_of(
    operands, "q", "k", "scalars", "initial"
  )
  y = plan.call(
    _read_kernel,
    "read",
    (pl.cdiv(width, plan.columns(width)), plan.chunks, n, b),
    arrays,
    {"y": like(operands.q, b, t, n, width, dtype=operands.q.dtype)},
  )["y"]
  return y, kept["end"]


def plan_of(operands: Operands, config: TritonConfig, interpret: bool) -> Plan:
  widths = operands.k.shape[3], operands.v.shape[3]
  return Plan(operands.q.shape[1], widths, config, interpret)


def operands_of(operands: Operands, *names: str) -> dict[str, jax.Array]:
  """Those that there are, memories as if they were those of chunks."""
  found = {name: getattr(operands, name) for name in names}
  return {
    name: x[:, None] if name in ("state", "initial") else x
    for name, x in found.items()
    if x is not None
  }


def along_chunks(
  operands: Operands, plan: Plan, *, wanted: bool = False
) -> dict[str, jax.Array]:
  """What the gradients, or reads, of chunks need to know of those before.

  Args:
    operands: of the forward pass.
    plan: of the call.
    wanted: whether that is among them.

  Returns:
    In the dtype of the operands: `inverse` [b t n c]; `written` [b t n v];
    `wanted` [b t n v], values less what the memory before the chunk returns
    for their keys; `before` [b g n k v], these memories. And the memory at the
    `end` [b n k v], float32.
  """
  q, v = operands.q, operands.v
  b, t, n, width = v.shape
  of_tokens = lambda width: like(q, b, t, n, width, dtype=q.dtype)
  of_memories = lambda count, **options: like(
    q, b, count, n, *plan.widths, **options
  )
  solved = plan.call(
    *(_solve_kernel, "solve", (plan.chunks, 1, n, b)),
    operands_of(operands, "k", "scalars"),
    {"inverse": of_tokens(plan.config.chunk)},
    warps=_SOLVE_WARPS,
  )
  outputs = {
    "written": of_tokens(width),
    "before": of_memories(plan.chunks, dtype=q.dtype),
    "end": of_memories(1),
  }
  if wanted:
    outputs["wanted"] = of_tokens(width)
  kept = plan.call(
    _chain_kernel,
    "chain",
    (pl.cdiv(width, plan.columns(width)), 1, n, b),
    solved | operands_of(operands, "k", "v", "scalars", "state", "initial"),
    outputs,
    warps=plan.config.chain_warps,
  )
  return solved | kept | {"end": kept["end"][:, 0]}


def _solve_kernel(x, out, *, plan: Plan):
  rows = chunk(pl.program_id(0), plan)
  inner = whole(plan.widths[0])
  keys = load(x["k"], rows, inner)
  row, token = places(0, plan), places(1, plan)
  strict = dot(keys, keys, (1, 1), plan.interpret)
  strict *= between(x["scalars"], rows, plan)
  strict *= numbers(x["scalars"], BETA, rows)[:, None]
  strict = jnp.where(row > token, strict, 0.0)
  # By halves: of two blocks on the diagonal that are inverted, the one below
  # them is minus the product of their inverses and what was there. All blocks
  # of a size at once, with zeros elsewhere.
  apart = row ^ token  # below twice a size: in the same two blocks of that size
  inverse = jnp.where(row == token, 1.0, 0.0)
  size = 1
  while size < plan.config.chunk:
    below = (apart >= size) & (apart < 2 * size)
    below = jnp.where(below, strict, 0.0)
    if size > 1:
      below = dot(inverse, below, (1, 0), plan.interpret)
      below = dot(below, inverse, (1, 0), plan.interpret)
    inverse -= below
    size *= 2
  store(out["inverse"], inverse, rows, plan.row)


def _chain_kernel(x, out, *, plan: Plan):
  columns = part(pl.program_id(0), plan.columns(plan.widths[1]), plan.widths[1])
  dtype = x["k"].dtype
  starts = "initial" in x

  def step(i, states):
    rows = chunk(i, plan)
    number = functools.partial(numbers, x["scalars"], rows=rows)
    keys = lambda here: load(x["k"], rows, here)
    for here, state in zip(plan.inner, states, strict=True):
      store(out["before"], state, i, here, columns)
    memory = [state.astype(dtype) for state in states]
    old = number(CARRY)[:, None] * product(keys, memory, plan)
    if starts:
      # Fetched each time: registers have no room for it.
      fresh = lambda here: load(x["initial"], 0, here, columns)
      memory = (fresh(here).astype(dtype) for here in plan.inner)
      old += number(FRESH)[:, None] * product(keys, memory, plan)
    wanted = load(x["v"], rows, columns).astype(jnp.float32) - old
    if "wanted" in out:
      store(out["wanted"], wanted, rows, columns)
    wanted = (number(BETA)[:, None] * wanted).astype(dtype)
    separate(wanted, plan)
    inverse = load(x["inverse"], rows, plan.row)
    written = dot(inverse, wanted, (1, 0), plan.interpret).astype(dtype)
    store(out["written"], written, rows, columns)
    keep = load(x["scalars"], KEEP, rows.start)
    after = [keep * state for state in states]
    for j, here in enumerate(plan.inner):
      separate(written, plan)
      left = keys(here).astype(jnp.float32) * number(END)[:, None]
      after[j] += dot(left.astype(dtype), written, (0, 0), plan.interpret)
    if starts:
      keep = load(x["scalars"], FRESH_END, rows.start)
      for j, here in enumerate(plan.inner):
        separate(written, plan)
        after[j] += keep * fresh(here)
    return after

  states = [load(x["state"], 0, here, columns) for here in plan.inner]
  states = jax.lax.fori_loop(0, plan.chunks, step, states)
  for here, state in zip(plan.inner, states, strict=True):
    store(out["end"], state, 0, here, columns)


def product(left, right, plan: Plan):
  """Sum of the products of pieces: a function of spans, and as many arrays."""
  total = jnp.zeros((), jnp.float32)
  for here, x in zip(plan.inner, right, strict=True):
    separate(x, plan)
    total += dot(left(here), x, (1, 0), plan.interpret)
  return total


def separate(x, plan: Plan):
  """Keeps products of float32 from each other: registers hold one at a time."""
  if x.dtype == jnp.float32:
    wait(plan.interpret)


def _read_kernel(x, out, *, plan: Plan):
  place = pl.program_id(1)
  rows = chunk(place, plan)
  columns = part(pl.program_id(0), plan.columns(plan.widths[1]), plan.widths[1])
  dtype = x["q"].dtype
  kinds: list[tuple[str, Any, int]] = [("before", place, CARRY)]
  if "initial" in x:
    kinds.append(("initial", 0, FRESH))

  def reads(here):
    queries = load(x["q"], rows, here)
    pairs = dot(queries, load(x["k"], rows, here), (1, 1), plan.interpret)
    memories = [
      load(x[name], at, here, columns).astype(dtype) for name, at, _ in kinds
    ]
    return pairs, *(
      dot(queries, memory, (1, 0), plan.interpret) for memory in memories
    )

  tall = jnp.zeros((rows.size, columns.size), jnp.float32)
  sums = jnp.zeros((rows.size, rows.size), jnp.float32), *[tall] * len(kinds)
  pairs, *by_kind = along(reads, sums, plan.widths[0], plan.config.inner)
  pairs = (pairs * between(x["scalars"], rows, plan)).astype(dtype)
  written = load(x["written"], rows, columns)
  total = dot(pairs, written, (1, 0), plan.interpret)
  for (_, _, kind), read in zip(kinds, by_kind, strict=True):
    total += numbers(x["scalars"], kind, rows)[:, None] * read
  store(out["y"], total, rows, columns)


def chunk(index, plan: Plan) -> Span:
  return part(index, plan.config.chunk, plan.tokens)


def numbers(scalars, kind, rows: Span):
  """Of a chunk; there are some of every place, tokens or not."""
  return load(scalars, kind, rows._replace(end=None))


def places(axis, plan: Plan):
  shape = (plan.config.chunk, plan.config.chunk)
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def between(scalars, rows: Span, plan: Plan):
  """Of what the token of a column wrote, what is left at that of a row."""
  logs, resets = (numbers(scalars, kind, rows) for kind in (LOGS, RESETS))
  keep = (places(0, plan) >= places(1, plan)) & (
    resets[:, None] == resets[None]
  )
  # Masked before the exponential, which would overflow.
  left = jnp.exp(jnp.where(keep, logs[:, None] - logs[None], 0.0))
  return jnp.where(keep, left, 0.0)
