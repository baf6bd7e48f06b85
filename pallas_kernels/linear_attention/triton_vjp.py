"""Cached linear attention on a GPU: the backward pass.

The gradients of all states come first: sums over the tokens that read them,
then along the segments that go on from one another. Queries, and keys and
values, then get theirs from what reads and writes looked like, with one kernel
for keys and values, which change places: so do the axes of a state.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

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
  dot,
  load,
  numbers_of_head,
  of_head,
  part,
  parts_of_head,
  store,
  whole,
)
from .triton import (
  CHAIN,
  CHAIN_PARAMS,
  PREFIX,
  Plan,
  along,
  causal,
  for_each_state,
  left_of,
  outer,
  plan_of,
  present,
  read_online,
  specs_of,
  tokens_of_program,
)


def bwd(
  operands: TokenOperands,
  ends: jax.Array,
  d_y: jax.Array,
  d_ends: jax.Array,
  *,
  segment_length: int,
  linked: int,
  config: TritonConfig,
  interpret: bool = False,
) -> TokenOperands:
  """Gradients of all operands.

  Args:
    operands: those of the forward pass.
    ends: the states it returned.
    d_y: gradient of its reads, in the dtype of v.
    d_ends: gradient of its states, float32.
    segment_length: as in the forward pass.
    linked: as in the forward pass.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    One gradient per operand, of its shape and dtype. That of RESETS is 0, that
    of KEEP stands at the first token of each segment.
  """
  plan = plan_of(operands, segment_length, linked, config, interpret)
  d_ends, d_memories, d_state = _of_states(operands, d_y, d_ends, plan)
  d_keep = None
  if linked:
    d_ends, d_state, d_keep = _chain(operands, ends, d_ends, d_state, plan)
  d_q, d_weights, d_read = _of_reads(operands, ends, d_y, plan)
  d_v, _ = _of_writes("v", operands, d_y, d_ends, plan)
  d_k, d_written = _of_writes("k", operands, d_y, d_ends, plan)
  return TokenOperands(
    *(d_q, d_k, d_v, d_weights),
    _of_scalars(operands.scalars, d_read, d_written, d_keep, plan),
    *(d_memories, d_state),
  )


def _of_states(operands: TokenOperands, d_y, d_ends, plan: Plan):
  """Gradients of all states, as if none went on from another."""
  x, length = operands, plan.length
  carried = 0 if x.memories is None else x.memories.shape[1]

  def weight(x, slot, here):
    return load(x["weights"], here, slot).astype(jnp.float32)

  def carry(x, slot, here):
    del slot
    return load(x["scalars"], CARRY, here)

  def weight_of_end(x, slot, here):
    gate = weight(x, carried + slot, here)
    if plan.linked > 1:
      next_one = here.places() < (slot + 2) * length
      gate += jnp.where(next_one, load(x["scalars"], CARRY, here), 0.0)
    return gate

  arrays = {"left": x.q, "right": d_y, "weights": x.weights}
  d_ends = outer(
    f"{PREFIX}read_states",
    {**arrays, "scalars": x.scalars, "first": d_ends},
    plan.segments,
    plan,
    span=lambda slot: ((slot + 1) * length, plan.tokens),
    gate=weight_of_end,
  )
  d_memories = d_state = None
  if carried:
    d_memories = outer(
      *(f"{PREFIX}read_memories", arrays, carried, plan),
      span=lambda slot: (0, plan.tokens),
      gate=weight,
    )
  if x.state is not None:
    d_state = outer(
      f"{PREFIX}read_state",
      {"left": x.q, "right": d_y, "scalars": x.scalars},
      *(1, plan),
      span=lambda slot: (0, length),
      gate=carry,
    )
  return d_ends, d_memories, d_state


def _chain(operands: TokenOperands, ends, d_ends, d_state, plan: Plan):
  """Adds to the gradient of each state what comes from the next segment's."""
  arrays = present(
    d_ends=d_ends,
    d_state=d_state,
    ends=ends,
    scalars=operands.scalars,
    state=operands.state,
  )
  b, _, n, k, v = ends.shape
  tiles = pl.cdiv(v, CHAIN), pl.cdiv(k, CHAIN)
  keeps = like(ends, *tiles, b, n, plan.linked)
  outputs = present(d_ends=like(ends, *ends.shape))
  aliases = {0: 0}
  if d_state is not None:
    outputs["d_state"] = like(d_state, *d_state.shape)
    aliases[1] = 1
  specs = {name: of_head(x) for name, x in outputs.items()}
  outputs["keeps"] = keeps
  specs["keeps"] = pl.BlockSpec(
    (None, None, None, None, plan.linked), lambda i, j, n, b: (i, j, b, n, 0)
  )
  d = pl.pallas_call(
    functools.partial(_chain_kernel, plan=plan, widths=(k, v)),
    name=f"{PREFIX}chain_vjp",
    grid=(*tiles, n, b),
    in_specs=[specs_of(arrays)],
    out_specs=specs,
    out_shape=outputs,
    input_output_aliases=aliases,
    compiler_params=CHAIN_PARAMS,
    interpret=plan.interpret,
  )(arrays)
  return d["d_ends"], d.get("d_state"), jnp.sum(d["keeps"], (0, 1))


def _chain_kernel(x, d, *, plan: Plan, widths):
  columns = part(pl.program_id(0), CHAIN, widths[1])
  rows = part(pl.program_id(1), CHAIN, widths[0])

  def of(i):
    """What is known of a segment: its gradient, what it keeps."""
    keep = load(x["scalars"], KEEP, i * plan.length)
    return load(x["d_ends"], i, rows, columns), keep

  def link(i, own, before, passed_on):
    """What a segment passes on of what the next one passed on to it."""
    total = own[0] + passed_on
    store(d["d_ends"], total, i, rows, columns)
    store(d["keeps"], jnp.sum(total * before), i)
    return own[1] * total

  def fetch(step):
    i = plan.linked - 1 - step
    return of(i), load(x["ends"], i - 1, rows, columns)

  def body(step, fetched, passed_on):
    own, before = fetched
    return link(plan.linked - 1 - step, own, before, passed_on)

  nothing = jnp.zeros((CHAIN, CHAIN), jnp.float32)
  passed_on = along(plan.linked - 1, fetch, body, nothing)
  before = nothing
  if "state" in x:
    before = load(x["state"], 0, rows, columns)
  passed_on = link(0, of(0), before, passed_on)
  if "state" not in x:
    return
  passed_on += load(x["d_state"], 0, rows, columns)
  store(d["d_state"], passed_on, 0, rows, columns)


def _of_reads(operands: TokenOperands, ends, d_y, plan: Plan):
  """Gradients of queries, gates, and scalars [b n 1|2 t] OWN, CARRY."""
  arrays = present(**operands._asdict(), ends=ends, d_y=d_y)
  b, t, n, k = operands.q.shape
  columns = min(plan.config.columns, pl.next_power_of_2(k))
  parts = pl.cdiv(k, columns)
  shapes = {
    "q": like(operands.q, b, t, n, k, dtype=operands.q.dtype),
    "weights": like(operands.q, parts, *operands.weights.shape),
    "scalars": like(operands.q, parts, b, n, 2 if plan.linked else 1, t),
  }
  specs = {
    "q": of_head(operands.q),
    "weights": parts_of_head(of_head, shapes["weights"]),
    "scalars": parts_of_head(numbers_of_head, shapes["scalars"]),
  }
  d = pl.pallas_call(
    functools.partial(
      _reads_kernel, widths=(operands.v.shape[3], k), plan=plan
    ),
    name=f"{PREFIX}read_vjp",
    grid=(parts, pl.cdiv(t, plan.config.reads), n, b),
    in_specs=[specs_of(arrays)],
    out_specs=specs,
    out_shape=shapes,
    compiler_params=plan.params,
    interpret=plan.interpret,
  )(arrays)
  # States that a token must not read were not visited.
  carried = 0 if operands.memories is None else operands.memories.shape[1]
  slot = jnp.arange(operands.weights.shape[3]) - carried
  readable = slot[None] < (jnp.arange(t) // plan.length)[:, None]
  d_weights = jnp.where(readable[None, :, None], jnp.sum(d["weights"], 0), 0.0)
  d_weights = d_weights.astype(operands.weights.dtype)
  return d["q"], d_weights, jnp.sum(d["scalars"], 0)


def _reads_kernel(x, d, *, widths, plan: Plan):
  inner = whole(widths[0])
  columns = part(
    pl.program_id(0), min(plan.config.columns, d["q"].shape[1]), widths[1]
  )
  rows = tokens_of_program(plan)
  left = load(x["d_y"], rows, inner)
  total = read_online(
    *(left, x["v"], x["k"], x["scalars"]), *(rows, inner, columns), plan
  )
  queries = load(x["q"], rows, columns)
  store(d["scalars"], _sums(queries, total), 0, rows)
  total *= load(x["scalars"], OWN, rows)[:, None]
  d_carry = jnp.zeros((rows.size,), jnp.float32)

  def visit(totals, ref, slot, gate, *, column, goes_on):
    total, d_carry = totals
    state = load(ref, slot, columns, inner).astype(left.dtype)
    product = dot(left, state, (1, 1), plan.interpret)
    d_gate = _sums(queries, product)
    if column is not None:
      store(d["weights"], d_gate, rows, column)
    if goes_on is not None:
      d_carry += jnp.where(goes_on, d_gate, 0.0)
    return total + gate[:, None] * product, d_carry

  total, d_carry = for_each_state(visit, (total, d_carry), x, rows, plan)
  store(d["q"], total, rows, columns)
  if plan.linked:
    store(d["scalars"], d_carry, 1, rows)


def _sums(a, b):
  """Of the products of each row."""
  return jnp.sum(a.astype(jnp.float32) * b, 1)


def _of_writes(name, operands: TokenOperands, d_y, d_ends, plan: Plan):
  """Gradients of keys or values, and scalars [b n 2 t] WRITE, END of keys."""
  own = operands.k if name == "k" else operands.v
  b, t, n, width = own.shape
  arrays = present(
    ends=d_ends, k=operands.k, v=operands.v, q=operands.q, d_y=d_y
  )
  arrays["scalars"] = operands.scalars
  columns = min(plan.config.columns, pl.next_power_of_2(width))
  parts = pl.cdiv(width, columns)
  shapes = {"own": like(own, *own.shape, dtype=own.dtype)}
  specs = {"own": of_head(own)}
  if name == "k" and plan.decays:
    shapes["scalars"] = like(own, parts, b, n, 2, t)
    specs["scalars"] = parts_of_head(numbers_of_head, shapes["scalars"])
  other = operands.v if name == "k" else operands.k
  d = pl.pallas_call(
    functools.partial(
      _writes_kernel,
      roles=("v", "d_y", "q", "k") if name == "k" else ("k", "q", "d_y", "v"),
      widths=(other.shape[3], width),
      plan=plan,
    ),
    name=f"{PREFIX}write_{name}_vjp",
    grid=(parts, pl.cdiv(t, plan.config.writes), n, b),
    in_specs=[specs_of(arrays)],
    out_specs=specs,
    out_shape=shapes,
    compiler_params=plan.params,
    interpret=plan.interpret,
  )(arrays)
  return d["own"], jnp.sum(d["scalars"], 0) if "scalars" in d else None


def _writes_kernel(x, d, *, roles, widths, plan: Plan):
  """Gradients of tokens of keys [k], or of values [v].

  With roles k, q, D, v, of what was written is read by queries:

    dv_j = write_j sum_r (k_j q_r) own_r left_rj D_r + end_j k_j dS

  and those of keys with v, D, q, k and the transpose of dS.
  """
  left, right, values, own = roles
  inner = whole(widths[0])
  columns = part(
    pl.program_id(0), min(plan.config.columns, d["own"].shape[1]), widths[1]
  )
  rows = part(pl.program_id(1), plan.config.writes, plan.tokens)
  left = load(x[left], rows, inner)
  scalars, size = x["scalars"], plan.config.step
  final = jnp.minimum(rows.start + rows.size, plan.tokens) - 1

  def body(i, total):
    here = part(i, size, plan.tokens)
    pairs = dot(left, load(x[right], here, inner), (1, 1), plan.interpret)
    pairs *= load(scalars, OWN, here)[None]
    keep = causal(here.places()[None], rows.places()[:, None], plan)
    if plan.decays:
      taken = [load(scalars, kind, here)[None] for kind in (LOGS, RESETS)]
      given = [load(scalars, kind, rows)[:, None] for kind in (LOGS, RESETS)]
      pairs *= left_of(keep & (taken[1] == given[1]), taken[0] - given[0])
    pairs = jnp.where(keep, pairs, 0.0).astype(left.dtype)
    values_here = load(x[values], here, columns)
    return total + dot(pairs, values_here, (1, 0), plan.interpret)

  last = jnp.minimum((final // plan.length + 1) * plan.length, plan.tokens)
  total = jnp.zeros((rows.size, columns.size), jnp.float32)
  total = jax.lax.fori_loop(
    rows.start // size, pl.cdiv(last, size), body, total
  )
  mine = end = None
  if "scalars" in d:
    mine = load(x[own], rows, columns)
    store(d["scalars"], _sums(mine, total), 0, rows)
  if plan.decays:
    total *= load(scalars, WRITE, rows)[:, None]
    end = load(scalars, END, rows)
  segment = jax.lax.div(rows.places(), plan.length)

  def state(slot, written):
    place = (columns, inner) if own == "k" else (inner, columns)
    d_state = load(x["ends"], slot, *place).astype(left.dtype)
    contract = (1, 1) if own == "k" else (1, 0)
    product = dot(left, d_state, contract, plan.interpret)
    return jnp.where((segment == slot)[:, None], product, written)

  written = jax.lax.fori_loop(
    *(rows.start // plan.length, final // plan.length + 1),
    *(state, jnp.zeros_like(total)),
  )
  if "scalars" in d:
    store(d["scalars"], _sums(mine, written), 1, rows)
  if end is not None:
    written *= end[:, None]
  store(d["own"], total + written, rows, columns)


def _of_scalars(scalars, d_read, d_written, d_keep, plan: Plan):
  if not plan.decays:
    return d_read
  d_own, d_write, d_end = (
    d_read[:, :, 0],
    d_written[:, :, 0],
    d_written[:, :, 1],
  )
  d = jnp.zeros_like(scalars)
  # What a query takes of a token is own exp(logs - logs') write', of which
  # logs have the gradients that the two factors tell.
  d_logs = scalars[:, :, OWN] * d_own - scalars[:, :, WRITE] * d_write
  rows = {OWN: d_own, LOGS: d_logs, WRITE: d_write, END: d_end}
  if plan.linked:
    rows[CARRY] = d_read[:, :, 1]
  for kind, row in rows.items():
    d = d.at[:, :, kind].set(row)
  if d_keep is not None:
    last = (plan.linked - 1) * plan.length + 1
    d = d.at[:, :, KEEP, 0 : last : plan.length].set(d_keep)
  return d
