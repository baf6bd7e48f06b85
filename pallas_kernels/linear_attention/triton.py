"""Cached linear attention on a GPU: the forward pass.

Programs of their own write the states of all segments to main memory. Blocks
of consecutive tokens, within a segment or over several, then read them: what a
token reads of its own segment is a masked product, and it reads a state with
gate 0 where it must not.

Arrays are taken as the op has them, tokens before heads: nothing is copied.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .config import TritonConfig
from .operands import (
  CARRY,
  END,
  KEEP,
  LOGS,
  OWN,
  RESETS,
  WRITE,
  TokenOperands,
  like,
)
from .tiles import (
  Span,
  dot,
  load,
  numbers_of_head,
  of_head,
  part,
  store,
  whole,
)

# A side of the tiles of states that chains of segments go along, and for how
# many segments these are fetched together: waiting for each would take longest.
CHAIN = 32
TOGETHER = 4
PREFIX = "memcache_cached_linear_attention_"
CHAIN_PARAMS = plgpu.CompilerParams(num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Plan:
  """What a kernel knows about its call.

  Attributes:
    tokens: of the call.
    length: tokens of a segment; the last one may have fewer.
    linked: so many of the first segments go on from the state before them.
    decays: whether there are more scalars than OWN.
    config: the pieces.
    interpret: run without a GPU.
  """

  tokens: int
  length: int
  linked: int
  decays: bool
  config: TritonConfig
  interpret: bool

  @property
  def segments(self) -> int:
    return pl.cdiv(self.tokens, self.length)

  @property
  def params(self) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
      num_warps=self.config.warps, num_stages=self.config.stages
    )

  def tokens_at(self, first, size, last) -> Span:
    """Tokens from a segment's start on, where one starts or the call ends."""
    aligned = self.length % size == 0 and self.tokens % size == 0
    return Span(first, size, None if aligned else last)


def fwd(
  operands: TokenOperands,
  *,
  segment_length: int,
  linked: int,
  config: TritonConfig,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Reads of all tokens and end states of all segments.

  Args:
    operands: see `TokenOperands`.
    segment_length: tokens of a segment; the last one may have fewer.
    linked: so many of the first segments go on from the state before them, as
      far as KEEP says; the others start from nothing.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    y [b t n v] in the dtype of v and the states [b g n k v] in float32.
  """
  plan = plan_of(operands, segment_length, linked, config, interpret)
  ends = outer(
    f"{PREFIX}write",
    {"left": operands.k, "right": operands.v, "scalars": operands.scalars},
    plan.segments,
    plan,
    span=lambda slot: (slot * plan.length, (slot + 1) * plan.length),
    gate=_left_at_end if plan.decays else None,
  )
  if linked:
    ends = _chain(ends, operands, plan)
  arrays = present(**operands._asdict(), ends=ends)
  b, t, n, width = operands.v.shape
  columns = min(config.columns, pl.next_power_of_2(width))
  y = pl.pallas_call(
    functools.partial(
      _read_kernel, widths=(operands.q.shape[3], width), plan=plan
    ),
    name=f"{PREFIX}read",
    grid=(pl.cdiv(width, columns), pl.cdiv(t, config.reads), n, b),
    in_specs=[specs_of(arrays)],
    out_specs=of_head(operands.v),
    out_shape=like(operands.q, b, t, n, width, dtype=operands.v.dtype),
    compiler_params=plan.params,
    interpret=interpret,
  )(arrays)
  return y, ends


def plan_of(operands, length, linked, config, interpret) -> Plan:
  decays = operands.scalars.shape[2] > 1
  return Plan(operands.q.shape[1], length, linked, decays, config, interpret)


def present(**arrays) -> dict[str, Any]:
  return {name: x for name, x in arrays.items() if x is not None}


def specs_of(arrays: dict[str, Any]) -> dict[str, pl.BlockSpec]:
  return {
    name: numbers_of_head(x) if name == "scalars" else of_head(x)
    for name, x in arrays.items()
  }


def outer(name, arrays, slots, plan: Plan, *, span, gate) -> jax.Array:
  """A sum of outer products of tokens for each slot: [b slots n k v].

  Args:
    name: of the kernel.
    arrays: "left" [b t n k], "right" [b t n v] and what `gate` looks at;
      "first" is what the sums start from.
    slots: how many.
    plan: of the call.
    span: the first token of a slot and the one after the last.
    gate: of a slot, numbers that tokens are multiplied with; None for 1.
  """
  left, right = arrays["left"], arrays["right"]
  b, _, n, k = left.shape
  v = right.shape[3]
  tiles = pl.cdiv(k, plan.config.state) * pl.cdiv(v, plan.config.state)
  shape = like(left, b, slots, n, k, v)
  return pl.pallas_call(
    functools.partial(
      _outer_kernel, widths=(k, v), span=span, gate=gate, plan=plan
    ),
    name=name,
    grid=(tiles, slots, n, b),
    in_specs=[specs_of(arrays)],
    out_specs=of_head(shape),
    out_shape=shape,
    compiler_params=plan.params,
    interpret=plan.interpret,
  )(arrays)


def _outer_kernel(x, sums, *, widths, span, gate, plan: Plan):
  side, size = plan.config.state, plan.config.step
  tile, slot = pl.program_id(0), pl.program_id(1)
  across = pl.cdiv(widths[1], side)
  rows = part(tile // across, min(side, sums.shape[1]), widths[0])
  columns = part(tile % across, min(side, sums.shape[2]), widths[1])
  first, last = span(slot)
  last = jnp.minimum(last, plan.tokens)

  def body(i, total):
    here = plan.tokens_at(first + i * size, size, last)
    left = load(x["left"], here, rows)
    if gate is not None:
      gated = left.astype(jnp.float32) * gate(x, slot, here)[:, None]
      left = gated.astype(left.dtype)
    right = load(x["right"], here, columns)
    return total + dot(left, right, (0, 0), plan.interpret)

  if "first" in x:
    total = load(x["first"], slot, rows, columns)
  else:
    total = jnp.zeros((rows.size, columns.size), jnp.float32)
  total = jax.lax.fori_loop(0, pl.cdiv(last - first, size), body, total)
  store(sums, total, slot, rows, columns)


def _left_at_end(x, slot, here):
  del slot
  return load(x["scalars"], END, here)


def _chain(ends, operands: TokenOperands, plan: Plan):
  """Adds to the end state of each segment what is left of the one before."""
  arrays = present(ends=ends, scalars=operands.scalars, state=operands.state)
  b, _, n, k, v = ends.shape
  return pl.pallas_call(
    functools.partial(_chain_kernel, plan=plan, widths=(k, v)),
    name=f"{PREFIX}chain",
    grid=(pl.cdiv(v, CHAIN), pl.cdiv(k, CHAIN), n, b),
    in_specs=[specs_of(arrays)],
    out_specs=of_head(ends),
    out_shape=like(ends, *ends.shape),
    input_output_aliases={0: 0},
    compiler_params=CHAIN_PARAMS,
    interpret=plan.interpret,
  )(arrays)


def _chain_kernel(x, ends, *, plan: Plan, widths):
  columns = part(pl.program_id(0), CHAIN, widths[1])
  rows = part(pl.program_id(1), CHAIN, widths[0])

  def fetch(i):
    keep = load(x["scalars"], KEEP, i * plan.length)
    return keep, load(x["ends"], i, rows, columns)

  def body(i, fetched, state):
    keep, written = fetched
    state = written + keep * state
    store(ends, state, i, rows, columns)
    return state

  if "state" in x:
    state = load(x["state"], 0, rows, columns)
  else:
    state = jnp.zeros((CHAIN, CHAIN), jnp.float32)
  along(plan.linked, fetch, body, state)


def along(count, fetch, body, carry):
  """A loop of `body(i, fetch(i), carry)` that fetches for some at a time."""

  def group(j, carry):
    places = [j * TOGETHER + i for i in range(TOGETHER)]
    for i, fetched in zip(places, [fetch(i) for i in places], strict=True):
      carry = body(i, fetched, carry)
    return carry

  groups = count // TOGETHER
  carry = jax.lax.fori_loop(0, groups, group, carry)
  return jax.lax.fori_loop(
    groups * TOGETHER, count, lambda i, x: body(i, fetch(i), x), carry
  )


def _read_kernel(x, y, *, widths, plan: Plan):
  inner = whole(widths[0])
  columns = part(
    pl.program_id(0), min(plan.config.columns, y.shape[1]), widths[1]
  )
  rows = tokens_of_program(plan)
  left = load(x["q"], rows, inner)
  total = read_online(
    *(left, x["k"], x["v"], x["scalars"]), *(rows, inner, columns), plan
  )
  total *= load(x["scalars"], OWN, rows)[:, None]

  def visit(total, ref, slot, gate, **_):
    state = load(ref, slot, inner, columns).astype(left.dtype)
    product = dot(left, state, (1, 0), plan.interpret)
    return total + gate[:, None] * product

  store(y, for_each_state(visit, total, x, rows, plan), rows, columns)


def tokens_of_program(plan: Plan) -> Span:
  """Its rows; the last ones, which read most states, come first."""
  last = pl.num_programs(1) - 1
  return part(last - pl.program_id(1), plan.config.reads, plan.tokens)


def read_online(left, right, values, scalars, rows, inner, columns, plan):
  """What queries read of the tokens of their segments, with OWN left out."""

  def body(i, total):
    here = part(i, plan.config.step, plan.tokens)
    pairs = dot(left, load(right, here, inner), (1, 1), plan.interpret)
    keep = causal(rows.places()[:, None], here.places()[None], plan)
    if plan.decays:
      taken = [load(scalars, kind, rows)[:, None] for kind in (LOGS, RESETS)]
      given = [load(scalars, kind, here)[None] for kind in (LOGS, RESETS)]
      pairs *= left_of(keep & (taken[1] == given[1]), taken[0] - given[0])
      pairs *= load(scalars, WRITE, here)[None]
    pairs = jnp.where(keep, pairs, 0.0).astype(left.dtype)
    values_here = load(values, here, columns)
    return total + dot(pairs, values_here, (1, 0), plan.interpret)

  size, length = plan.config.step, plan.length
  first = rows.start // length * length // size
  last = jnp.minimum(rows.start + rows.size, plan.tokens)
  total = jnp.zeros((rows.size, columns.size), jnp.float32)
  return jax.lax.fori_loop(first, pl.cdiv(last, size), body, total)


def causal(query, token, plan: Plan):
  """Which tokens the online memories of queries hold."""
  same = jax.lax.div(query, plan.length) == jax.lax.div(token, plan.length)
  return (token <= query) & same


def left_of(keep, logs):
  """Of what a token wrote, what is left: 0 where nothing is."""
  # Masked before the exponential, which would overflow.
  return jnp.where(keep, jnp.exp(jnp.where(keep, logs, 0.0)), 0.0)


def for_each_state(visit, total, x, rows: Span, plan: Plan):
  """Visits the states that tokens may read, or go on from.

  `visit` takes a total and returns it; it is told the reference to states, the
  state's slot there, the tokens' gates; `column` of the weights, None if there
  is none; and which tokens go on from it, None if no token does.
  """
  segment = jax.lax.div(rows.places(), plan.length)
  carry: Any = load(x["scalars"], CARRY, rows) if plan.linked else None
  carried = x["memories"].shape[0] if "memories" in x else 0

  def memory(i, total):
    gate = load(x["weights"], rows, i).astype(jnp.float32)
    return visit(total, x["memories"], i, gate, column=i, goes_on=None)

  def end(i, total):
    gate = load(x["weights"], rows, carried + i).astype(jnp.float32)
    gate = jnp.where(segment > i, gate, 0.0)
    goes_on = None
    if plan.linked > 1:
      goes_on = segment == i + 1
      gate += jnp.where(goes_on, carry, 0.0)
    return visit(
      *(total, x["ends"], i, gate), column=carried + i, goes_on=goes_on
    )

  def state(i, total):
    goes_on = segment == 0
    gate = jnp.where(goes_on, carry, 0.0)
    return visit(total, x["state"], i, gate, column=None, goes_on=goes_on)

  if carried:
    total = jax.lax.fori_loop(0, carried, memory, total)
  last = jnp.minimum(rows.start + rows.size, plan.tokens) - 1
  total = jax.lax.fori_loop(0, last // plan.length, end, total)
  if "state" in x:
    some = (rows.start < plan.length).astype(jnp.int32)
    total = jax.lax.fori_loop(0, some, state, total)
  return total
