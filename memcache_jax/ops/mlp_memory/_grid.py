"""Tokens of one call, laid out as inner batches.

Three layouts, cheapest first: `fresh` (a new sequence, nothing masked: a
reshape), `single` (one token) and `aligned` (anything; tokens are gathered to
where inner batches, which count real tokens of one document, begin on a grid).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.ops.mlp_memory import _coefficients
from memcache_jax.ops.mlp_memory._block import Blocks, Written
from memcache_jax.ops.mlp_memory._moves import (
  extend,
  put_tail,
  split,
  take_tail,
  to_blocks,
)
from memcache_jax.ops.mlp_memory._pieces import num_pieces, to_pieces
from memcache_jax.ops.mlp_memory._state import MLPMemoryState, Rule, Tail


class Inputs(NamedTuple):
  """What `mlp_memory` is given, checked, masked tokens zero.

  Attributes:
    tail_gates: gates of tokens that are kept with them.
    others as in `mlp_memory`.
  """

  q: Float[Array, "b t n k"]
  k: Float[Array, "b t n k"]
  v: Float[Array, "b t n v"]
  tail_gates: dict[str, Float[Array, "b t n"]]
  log_decay: Float[Array, "b t n"] | None
  momentum: Float[Array, "b t n"] | None
  step: Float[Array, "b t n w"] | None
  coef: Float[Array, "b t n i"] | None
  row_scale: Float[Array, "n i"] | None
  mix: tuple[Float[Array, "b t n s"], Float[Array, "b t n"]] | None


class Scalars(NamedTuple):
  """The numbers of `Inputs` that are not kept with tokens, [*b n c ...]."""

  log_decay: Float[Array, "*b n c"] | None
  momentum: Float[Array, "*b n c"] | None
  step: Float[Array, "*b n c w"] | None
  coef: Float[Array, "*b n c i"] | None
  mix: tuple[Float[Array, "*b n c s"], Float[Array, "*b n c"]] | None


def fresh(
  rule: Rule, inputs: Inputs, begin: int, size: int, count: int = 1
) -> Blocks:
  """Blocks of tokens `begin` and on, of a new sequence with nothing masked.

  Args:
    rule: the memory.
    inputs: all tokens.
    begin: the first token.
    size: tokens per block.
    count: blocks.
  """
  end = begin + count * size
  cut = lambda x: split(x[:, begin:end], size)
  written = Written(inputs.k, inputs.v, inputs.tail_gates)
  before = 0 if rule.pairwise else rule.tail

  def columns(x):
    pad = [(0, 0)] * x.ndim
    pad[1] = (max(before - begin, 0), 0)
    return extend(
      jnp.pad(x[:, max(begin - before, 0) : end], pad), size, before
    )

  ages = None
  if before:
    ages = jnp.arange(begin, end, dtype=jnp.float32)
    ages = ages.reshape(count, 1, 1, size)
  written = jax.tree.map(columns, written)
  return _blocks(
    rule, cut(inputs.q), written, _scalars(inputs, cut), inputs, ages, None
  )


def rest(rule: Rule, inputs: Inputs) -> list[int]:
  """Sizes of blocks for the tokens after the last whole inner batch.

  Those of whole pieces first, so that as few as can be are one piece.
  """
  t, k = inputs.q.shape[1], inputs.q.shape[-1]
  count = num_pieces(rule, rule.inner_batch, k, inputs.v.shape[-1])
  size = rule.inner_batch // count
  left = t % rule.inner_batch
  return [x for x in (left - left % size, left % size) if x]


def fresh_tail(rule: Rule, inputs: Inputs) -> Tail | None:
  """The tail after all tokens of a new sequence with nothing masked."""
  if not rule.tail:
    return None

  def last(x):
    x = x[:, max(x.shape[1] - rule.tail, 0) :].astype(jnp.float32)
    pad = [(0, 0)] * x.ndim
    pad[1] = (rule.tail - x.shape[1], 0)
    return jnp.pad(x, pad)

  return jax.tree.map(last, Tail(inputs.k, inputs.v, inputs.tail_gates))


class Aligned(NamedTuple):
  """Blocks of any tokens, and what leads back from them."""

  blocks: Blocks
  tail: Tail | None
  position: Int[Array, " b"]
  target: Int[Array, "b t"]
  overflow: Bool[Array, " b"]


def aligned(
  rule: Rule,
  inputs: Inputs,
  state: MLPMemoryState,
  mask: Bool[Array, "b t"],
  starts: Bool[Array, "b t"],
  num_blocks: int,
) -> Aligned:
  """Lays tokens of any kind out on a grid of inner batches."""
  size, b = rule.inner_batch, mask.shape[0]
  offset = state.position % size
  grid = token_layout.align(mask, starts, offset, size, num_blocks)

  def cut(x):
    x = token_layout.take_tokens(x, grid.source)
    keep = grid.valid.reshape(grid.valid.shape + (1,) * (x.ndim - 3))
    return to_blocks(jnp.where(keep, x, jnp.zeros((), x.dtype)))

  valid = jnp.moveaxis(grid.valid, 1, 0)[:, :, None]
  used = jnp.any(grid.valid, axis=-1)
  age = _block_ages(grid, state.position, size)
  ages = age[:, :, None, None] + jnp.arange(size, dtype=jnp.float32).reshape(
    1, 1, 1, -1
  )
  flat = jax.tree.map(
    lambda x: jnp.where(
      grid.valid.reshape(b, -1, *(1,) * (x.ndim - 2)),
      token_layout.take_tokens(x, grid.source.reshape(b, -1)),
      jnp.zeros((), x.dtype),
    ),
    Tail(inputs.k, inputs.v, inputs.tail_gates),
  )
  place = jnp.arange(num_blocks * size, dtype=jnp.int32)[None]
  place = jnp.where(grid.valid.reshape(b, -1), place + 1, 0)
  last = jnp.max(place, axis=1)
  any_token = last > 0
  position = jnp.take_along_axis(
    jnp.moveaxis(age, 0, 1), (jnp.maximum(last - 1, 0) // size)[:, None], axis=1
  )[:, 0].astype(jnp.int32)
  position = jnp.where(
    any_token, position + (last - 1) % size + 1, state.position
  )
  tail, before = None, 0
  if rule.tail:
    before = 0 if rule.pairwise else rule.tail
    flat = jax.tree.map(
      lambda old, new: put_tail(old, new, offset), state.tail, flat
    )
    end = jnp.where(any_token, last, offset)
    tail = jax.tree.map(lambda x: take_tail(x, end, position, rule.tail), flat)
    flat = jax.tree.map(lambda x: x[:, rule.tail - before :], flat)
  written = jax.tree.map(lambda x: extend(x, size, before), flat)
  blocks = _blocks(
    rule,
    cut(inputs.q),
    Written(*written),
    _scalars(inputs, cut),
    inputs,
    ages,
    valid,
  )._replace(
    fresh=jnp.moveaxis(grid.fresh, 1, 0),
    full=jnp.moveaxis(grid.valid[:, :, -1], 1, 0),
    used=jnp.moveaxis(used, 1, 0),
  )
  return Aligned(blocks, tail, position, grid.target, grid.overflow)


def single(
  rule: Rule,
  inputs: Inputs,
  state: MLPMemoryState,
  mask: Bool[Array, "b 1"] | None,
  starts: Bool[Array, "b 1"] | None,
) -> tuple[Blocks, Tail | None, Int[Array, " b"]]:
  """One token, as one block of one row."""
  b = inputs.q.shape[0]
  valid = jnp.ones((b, 1), bool) if mask is None else mask
  begins = jnp.zeros((b, 1), bool) if starts is None else starts & valid
  age = jnp.where(begins[:, 0], 0, state.position)
  position = age + valid[:, 0].astype(jnp.int32)
  cut = lambda x: to_blocks(x[:, None])[0]
  written = Tail(inputs.k, inputs.v, inputs.tail_gates)
  ages = age.astype(jnp.float32)[:, None, None]
  tail = None
  if rule.tail:
    written = jax.tree.map(
      lambda old, new: jnp.concatenate([old.astype(new.dtype), new], axis=1),
      state.tail,
      written,
    )
    end = valid[:, 0].astype(jnp.int32)
    tail = jax.tree.map(
      lambda x: take_tail(x, end, position, rule.tail), written
    )
  written = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), written)
  blocks = _blocks(
    rule,
    cut(inputs.q),
    Written(*written),
    _scalars(inputs, cut),
    inputs,
    ages,
    valid[:, None],
    place=age % rule.inner_batch,
  )
  full = valid[:, 0] & (position % rule.inner_batch == 0)
  fresh = None if starts is None else begins[:, 0]
  used = None if mask is None else valid[:, 0]
  blocks = blocks._replace(fresh=fresh, full=full, used=used)
  return jax.tree.map(lambda x: x[None], blocks), tail, position


def _scalars(inputs, cut):
  cut32 = lambda x: cut(x.astype(jnp.float32))
  return jax.tree.map(
    cut32,
    Scalars(
      inputs.log_decay,
      inputs.momentum,
      inputs.step if inputs.row_scale is None else None,
      inputs.coef,
      inputs.mix,
    ),
  )


def _block_ages(grid, position, size):
  """Tokens of the document before each block's first place [g b], float32."""
  b, g = grid.fresh.shape
  index = jnp.arange(g, dtype=jnp.int32)[None]
  first = jax.lax.cummax(jnp.where(grid.fresh, index, -1), axis=1)
  running = position[:, None] // size + index
  age = jnp.where(first < 0, running, index - first) * size
  return jnp.moveaxis(age, 1, 0).astype(jnp.float32)


def _blocks(rule, q, written, scalars, inputs, ages, valid, place=None):
  """Joins the parts; `place` is that of a single token in its batch."""
  axis = q.ndim - 2
  count = num_pieces(rule, q.shape[axis], q.shape[-1], written.v.shape[-1])
  cut = lambda tree: jax.tree.map(lambda x: to_pieces(x, count, axis), tree)
  if rule.pairwise:
    coef = _coefficients.pairs(
      scalars.coef, inputs.row_scale, written.gates, q.shape[axis], place
    )
    if place is None:
      coefficients = cut(_coefficients.pairwise(coef, valid))
    else:
      coefficients = cut(_coefficients.of_pairs(coef))
  else:
    decay = scalars.log_decay
    decay = None if decay is None else jnp.exp(decay)
    coefficients = _coefficients.mask_rows(
      *cut((scalars.step, decay, scalars.momentum, valid, ages))
    )
    if not rule.reads_own_batch:
      coefficients = _coefficients.without_reads(
        coefficients, adds_up=rule.closing.reads_own_batch
      )
  return Blocks(written, coefficients, *cut((q, scalars.mix)))
