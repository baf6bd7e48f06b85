"""The delta rule on a GPU: the backward pass.

What the forward pass knew of chunks is computed again. Then all chunks at once
find the gradients of what they wrote, as far as their own queries read it;
programs with some columns of the gradient of the memory in registers go along
the chunks in reverse; and all tokens get theirs at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.operands import like
from ..linear_attention.tiles import along, dot, load, part, store, whole
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
from .triton import (
  Plan,
  along_chunks,
  between,
  chunk,
  numbers,
  operands_of,
  places,
  plan_of,
  product,
  separate,
)


def bwd(
  operands: Operands,
  d_y: jax.Array,
  d_end: jax.Array,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> Operands:
  """Gradients of all operands.

  Args:
    operands: those of the forward pass.
    d_y: gradient of its reads, in the dtype of v.
    d_end: gradient of the memory it returned, float32.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    One gradient per operand, of its shape and dtype. That of RESETS is 0;
    those of KEEP and FRESH_END stand at the first token of each chunk.
  """
  plan = plan_of(operands, config, interpret)
  kept = along_chunks(operands, plan, wanted=True)
  d = _chain(operands, kept, d_y, d_end, plan)
  d_q, d_k, d_scalars = _tokens(operands, kept, d, d_y, plan)
  d_scalars = d_scalars.at[:, :, BETA].add(d["beta"])
  d_initial = None
  if operands.initial is not None:
    d_initial = _initial(operands, d, d_y, plan)
  return Operands(d_q, d_k, d["v"], d_scalars, d["state"], d_initial)


def _chain(operands: Operands, kept, d_y, d_end, plan: Plan):
  """Gradients along the chunks.

  Returns:
    In the dtype of the operands, those of `wanted` and of values `v`, and of
    the memory `after` each chunk. In float32, that of the first `state`, and
    what `wanted` means for BETA.
  """
  v, scalars = operands.v, operands.scalars
  b, t, n, width = v.shape
  parts = pl.cdiv(width, plan.columns(width))
  of_tokens = like(v, b, t, n, width, dtype=v.dtype)
  read = plan.call(
    *(_read_kernel, "read_vjp", (parts, plan.chunks, n, b)),
    operands_of(operands, "q", "k", "scalars") | {"d_y": d_y},
    {"written": of_tokens},
  )
  d = plan.call(
    _chain_kernel,
    "chain_vjp",
    (parts, 1, n, b),
    {
      **operands_of(operands, "q", "k", "scalars"),
      **{"d_y": d_y, "d_end": d_end[:, None], "d_written": read["written"]},
      **{name: kept[name] for name in ("inverse", "wanted")},
    },
    {
      "wanted": of_tokens,
      "v": of_tokens,
      "after": like(v, b, plan.chunks, n, *plan.widths, dtype=v.dtype),
      "state": like(v, b, 1, n, *plan.widths),
      "numbers": like(v, parts, b, n, 1, scalars.shape[3]),
    },
    warps=plan.config.chain_warps,
  )
  beta = jnp.sum(d.pop("numbers"), 0)[:, :, 0]
  return d | {"state": d["state"][:, 0], "beta": beta}


def _read_kernel(x, out, *, plan: Plan):
  rows, inner = chunk(pl.program_id(1), plan), whole(plan.widths[0])
  columns = part(pl.program_id(0), plan.columns(plan.widths[1]), plan.widths[1])
  queries = load(x["q"], rows, inner)
  pairs = dot(queries, load(x["k"], rows, inner), (1, 1), plan.interpret)
  pairs = (pairs * between(x["scalars"], rows, plan)).astype(queries.dtype)
  d_y = load(x["d_y"], rows, columns)
  store(out["written"], dot(pairs, d_y, (0, 0), plan.interpret), rows, columns)


def _chain_kernel(x, out, *, plan: Plan):
  columns = part(pl.program_id(0), plan.columns(plan.widths[1]), plan.widths[1])
  dtype = x["k"].dtype

  def step(i, after):
    place = plan.chunks - 1 - i
    rows = chunk(place, plan)
    number = lambda kind: numbers(x["scalars"], kind, rows)[:, None]

    def left(here):
      keys = load(x["k"], rows, here).astype(jnp.float32)
      return (keys * number(END)).astype(dtype)

    for here, d in zip(plan.inner, after, strict=True):
      store(out["after"], d, place, here, columns)
    written = load(x["d_written"], rows, columns).astype(jnp.float32)
    memory = [d.astype(dtype) for d in after]
    written += product(left, memory, plan)
    separate(written, plan)
    inverse = load(x["inverse"], rows, plan.row)
    wanted = dot(inverse, written.astype(dtype), (0, 0), plan.interpret)
    store(out["wanted"], wanted, rows, columns)
    beta = wanted * load(x["wanted"], rows, columns).astype(jnp.float32)
    store(out["numbers"], jnp.sum(beta, 1), 0, rows._replace(end=None))
    old = number(BETA) * wanted  # with its sign turned; also that of values
    store(out["v"], old, rows, columns)
    separate(old, plan)
    d_y = load(x["d_y"], rows, columns).astype(jnp.float32)
    read = (number(CARRY) * d_y).astype(dtype)
    old = (number(CARRY) * old).astype(dtype)

    keep = load(x["scalars"], KEEP, rows.start)
    before = [keep * d for d in after]
    for name, taken in (("q", read), ("k", -old)):
      for j, here in enumerate(plan.inner):
        separate(read, plan)
        tokens = load(x[name], rows, here)
        before[j] += dot(tokens, taken, (0, 0), plan.interpret)
    return before

  states = [load(x["d_end"], 0, here, columns) for here in plan.inner]
  states = jax.lax.fori_loop(0, plan.chunks, step, states)
  for here, state in zip(plan.inner, states, strict=True):
    store(out["state"], state, 0, here, columns)


def _tokens(operands: Operands, kept, d, d_y, plan: Plan):
  """Gradients of queries, keys and scalars, of BETA as far as keys know it."""
  q, k, scalars = operands.q, operands.k, operands.scalars
  b, _, n, width = k.shape
  parts = pl.cdiv(width, plan.columns(width))
  found = plan.call(
    _tokens_kernel,
    "tokens_vjp",
    (parts, plan.chunks, n, b),
    {
      **operands_of(operands, "q", "k", "scalars", "initial"),
      **{name: kept[name] for name in ("written", "before")},
      **{"d_y": d_y, "d_wanted": d["wanted"], "after": d["after"]},
    },
    {
      "q": like(q, *q.shape, dtype=q.dtype),
      "k": like(k, *k.shape, dtype=k.dtype),
      "numbers": like(q, parts, *scalars.shape),
    },
  )
  return found["q"], found["k"], jnp.sum(found["numbers"], 0)


def _tokens_kernel(x, out, *, plan: Plan):
  place = pl.program_id(1)
  rows = chunk(place, plan)
  columns = part(pl.program_id(0), plan.columns(plan.widths[0]), plan.widths[0])
  number = lambda kind: numbers(x["scalars"], kind, rows)[:, None]
  multiply = functools.partial(dot, interpret=plan.interpret)
  dtype = x["k"].dtype

  def put(kind, value):
    store(out["numbers"], value, kind, rows._replace(end=None))

  def sums(body, *shapes):
    zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    return along(body, zeros, plan.widths[1], plan.config.inner)

  values = lambda name, here: load(x[name], rows, here)
  memory = lambda name, at, here: load(x[name], at, columns, here)

  def pairs(here):
    written = values("written", here)
    after = memory("after", place, here)
    return (
      multiply(values("d_y", here), written, (1, 1)),
      multiply(values("d_wanted", here), written, (1, 1)),
      multiply(written, after, (1, 1)),
    )

  square, tall = (rows.size, rows.size), (rows.size, columns.size)
  scores, strict, at_end = sums(pairs, square, square, tall)
  keys, queries = (load(x[name], rows, columns) for name in "kq")
  k, q = keys.astype(jnp.float32), queries.astype(jnp.float32)
  # Of scores and of the triangular system, each as a row and as a column: what
  # a token's decay takes from it, the later ones do not lose.
  left = between(x["scalars"], rows, plan)
  scores = (scores * left).astype(dtype)
  d_q = multiply(scores, keys, (1, 0))
  d_k = multiply(scores, queries, (0, 0))
  logs = _sum(q * d_q) - _sum(k * d_k)
  strict *= left
  strict = jnp.where(places(0, plan) > places(1, plan), strict, 0.0)
  back = multiply((number(BETA) * strict).astype(dtype), keys, (0, 0))
  taken = multiply(strict.astype(dtype), keys, (1, 0))
  beta = _sum(k * taken)
  put(BETA, -beta)
  put(LOGS, logs - numbers(x["scalars"], BETA, rows) * beta + _sum(k * back))
  put(RESETS, jnp.zeros_like(beta))
  d_k -= number(BETA) * taken + back
  put(END, _sum(k * at_end))
  d_k += number(END) * at_end
  first = rows.places() == rows.start
  for name, at, kind, last in (
    ("before", place, CARRY, KEEP),
    ("initial", 0, FRESH, FRESH_END),
  ):
    if name not in x:
      put(kind, jnp.zeros_like(beta))
      put(last, jnp.zeros_like(beta))
      continue

    def reads(here, name=name, at=at):
      read, after = memory(name, at, here), memory("after", place, here)
      kept = jnp.sum(read.astype(jnp.float32) * after.astype(jnp.float32))
      read = read.astype(dtype)
      return (
        multiply(values("d_y", here), read, (1, 1)),
        multiply(values("d_wanted", here), read, (1, 1)),
        kept,
      )

    by_queries, by_keys, kept = sums(reads, tall, tall, ())
    put(last, jnp.where(first, kept, 0.0))
    by_keys *= number(BETA)
    put(kind, _sum(q * by_queries - k * by_keys))
    d_q += number(kind) * by_queries
    d_k -= number(kind) * by_keys
  store(out["q"], d_q, rows, columns)
  store(out["k"], d_k, rows, columns)


def _sum(x):
  return jnp.sum(x, 1)


def _initial(operands: Operands, d, d_y, plan: Plan):
  """Gradient of the memory that documents start with."""
  b, _, n, _ = operands.q.shape
  tiles = [pl.cdiv(width, plan.columns(width)) for width in plan.widths]
  return plan.call(
    _initial_kernel,
    "initial_vjp",
    (*tiles, n, b),
    {
      **operands_of(operands, "q", "k", "scalars"),
      **{"d_y": d_y, "d_v": d["v"], "after": d["after"]},
    },
    {"initial": like(operands.q, b, 1, n, *plan.widths)},
  )["initial"][:, 0]


def _initial_kernel(x, out, *, plan: Plan):
  inner, columns = (
    part(pl.program_id(i), plan.columns(width), width)
    for i, width in enumerate(plan.widths)
  )

  def step(i, total):
    rows = chunk(i, plan)
    fresh = numbers(x["scalars"], FRESH, rows)[:, None]

    def reads(left, right):
      right = load(x[right], rows, columns)
      right = (fresh * right.astype(jnp.float32)).astype(right.dtype)
      return dot(load(x[left], rows, inner), right, (0, 0), plan.interpret)

    after = load(x["after"], i, inner, columns).astype(jnp.float32)
    total += load(x["scalars"], FRESH_END, rows.start) * after
    return total + reads("q", "d_y") - reads("k", "d_v")

  total = jnp.zeros((inner.size, columns.size), jnp.float32)
  total = jax.lax.fori_loop(0, plan.chunks, step, total)
  store(out["initial"], total, 0, inner, columns)
