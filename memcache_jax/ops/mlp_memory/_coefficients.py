"""The scalars of an inner batch: how much of what each of its rows reads.

With all gradients G_i of a batch taken at its start, the recurrences

  S_r = m_r S_{r-1} - sum_i E[r, i] G_i,      theta_r = a_r theta_{r-1} + S_r

unroll to theta_r = A_r theta_0 + B_r S_0 - sum_i C[r, i] G_i. A, B and C obey
the same two recurrences (`_recurrence.py`). They are run where they are used,
so that no matrix of a batch is kept for the next.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.ops.mlp_memory._recurrence import recur


class End(NamedTuple):
  """What is left after all rows.

  Attributes:
    decay: A, of the weights before, in the weights after; None for 1.
    carry: B, of the momentum before; None for 0.
    write: C, of the gradients; None for 0.
    momentum_decay: of the momentum before, in the momentum after.
    momentum_write: of the gradients, in the momentum after.
  """

  decay: Float[Array, "*rows"] | None = None
  carry: Float[Array, "*rows"] | None = None
  write: Float[Array, "*rows e"] | None = None
  momentum_decay: Float[Array, "*rows"] | None = None
  momentum_write: Float[Array, "*rows e"] | None = None


class Coefficients(NamedTuple):
  """Rows c read columns e; after the last token rows repeat.

  Attributes:
    decay: A, of the weights before; None for 1.
    carry: B, of the momentum before; None for 0.
    write: C, of the gradients; None for 0: rows do not see their own batch.
    end: those of the weights and the momentum after the batch.
  """

  decay: Float[Array, "*rows c"] | None = None
  carry: Float[Array, "*rows c"] | None = None
  write: Float[Array, "*rows c e"] | None = None
  end: End = End()


class Rows(NamedTuple):
  """What the recurrences run on.

  Rows that do not exist change nothing: their steps are 0, their decays and
  momenta 1.

  Attributes:
    step: of the token so many steps before, 0 where there is none.
    decay: a, in [0, 1]; None for 1.
    momentum: m, in [0, 1]; None for 0.
    added: 0 in rows that do not exist, else 1; None where all do.
  """

  step: Float[Array, "*rows c w"]
  decay: Float[Array, "*rows c"] | None
  momentum: Float[Array, "*rows c"] | None
  added: Float[Array, "*rows c"] | None


def mask_rows(
  step: Float[Array, "*rows c w"],
  decay: Float[Array, "*rows c"] | None,
  momentum: Float[Array, "*rows c"] | None,
  valid: Bool[Array, "*#rows c"] | None,
  ages: Float[Array, "*#rows c"] | None,
) -> Rows:
  """Leaves out rows that do not exist, and tokens of other documents.

  Args:
    step: see `Rows`, like the two after it.
    decay: a.
    momentum: m.
    valid: rows that exist, None for all.
    ages: tokens of the document before each; None where there is no window.
  """
  if ages is not None:
    offsets = jnp.arange(step.shape[-1], dtype=jnp.float32)
    offsets = offsets.reshape((1,) * ages.ndim + offsets.shape)
    step = jnp.where(ages[..., None] >= offsets, step, 0.0)
  if valid is None:
    return Rows(step, decay, momentum, None)
  keep = lambda x: None if x is None else jnp.where(valid, x, 1.0)
  added = jnp.where(valid, jnp.ones_like(step[..., 0]), 0.0)
  step = jnp.where(valid[..., None], step, 0.0)
  return Rows(step, keep(decay), keep(momentum), added)


def _band(step: Float[Array, "*rows c w"]) -> Float[Array, "*rows c e"]:
  """E: token i is written at the steps i, ..., i + w - 1.

  The w - 1 tokens before the batch are the first columns.
  """
  c, window = step.shape[-2:]
  # Rows one longer than they should be, end to end: cut at the right length,
  # each begins one column further. Masks would have sums as their gradient.
  e = c + window - 1
  rows = jnp.flip(step, axis=-1)
  rows = jnp.pad(rows, [(0, 0)] * (step.ndim - 1) + [(0, e + 1 - window)])
  flat = rows.reshape(*step.shape[:-2], c * (e + 1))[..., : c * e]
  return flat.reshape(*step.shape[:-2], c, e)


def unroll(rows: Rows | Coefficients) -> Coefficients:
  """Runs the two recurrences of the module's top, where that is to be done."""
  if isinstance(rows, Coefficients):
    return rows
  step, decay, momentum, added = rows
  # Two columns more: of the weights and of the momentum before.
  pad = [(0, 0)] * (step.ndim - 1) + [(2, 0)]
  all_of, written = recur(jnp.pad(_band(step), pad), decay, momentum, added)
  last, written = all_of[..., -1, :], written[..., -1, :]
  end = End(write=last[..., 2:])
  result = Coefficients(write=all_of[..., 2:])
  if decay is not None:
    result = result._replace(decay=all_of[..., 0])
    end = end._replace(decay=last[..., 0])
  if momentum is not None:
    result = result._replace(carry=all_of[..., 1])
    end = end._replace(
      carry=last[..., 1],
      momentum_decay=written[..., 1],
      momentum_write=written[..., 2:],
    )
  return result._replace(end=end)


def without_reads(rows: Rows, *, adds_up: bool) -> Coefficients:
  """The coefficients where reads do not see their own batch: no matrices.

  Args:
    rows: what the recurrences run on.
    adds_up: whether the momentum is added to the weights at every row; False
      where the closing of the batch does that.
  """
  step, decay, momentum, added = rows
  axis, window = step.ndim - 2, step.shape[-1]

  def later(x):  # product over the rows after each
    x = jnp.concatenate([x[..., 1:], jnp.ones_like(x[..., :1])], axis=-1)
    return jax.lax.cumprod(x, axis=axis, reverse=True)

  def written(weight):  # at each row, spread over the tokens it writes
    total = jnp.zeros((), jnp.float32)
    for offset in range(window):
      pad = [(0, 0)] * axis + [(window - 1 - offset, offset)]
      total = total + jnp.pad(weight * step[..., offset], pad)
    return total

  end = End()
  if momentum is not None:
    # A token's own momentum multiplies what came before it only.
    own = later(momentum)
    end = End(
      momentum_decay=momentum[..., 0] * own[..., 0], momentum_write=written(own)
    )
  if adds_up:
    # What is added at a row, here or in the momentum, is added until the end.
    kept = jnp.ones_like(step[..., 0]) if decay is None else later(decay)
    kept = kept if added is None else added * kept
    if momentum is not None:
      kept = _add_later(kept, momentum)
      end = end._replace(carry=momentum[..., 0] * kept[..., 0])
    end = end._replace(write=written(kept))
  if decay is not None:
    decay = jax.lax.cumprod(decay, axis=axis)
    end = end._replace(decay=decay[..., -1])
  return Coefficients(decay=decay, end=end)


def _add_later(
  x: Float[Array, "*rows c"], momentum: Float[Array, "*rows c"]
) -> Float[Array, "*rows c"]:
  """``w_r = x_r + m_{r+1} w_{r+1}``."""

  def row(later, inputs):
    x, m = inputs
    total = x + later
    return m * total, total

  inputs = jnp.moveaxis(x, -1, 0), jnp.moveaxis(momentum, -1, 0)
  first = jnp.zeros_like(inputs[0][0])
  return jnp.moveaxis(jax.lax.scan(row, first, inputs, reverse=True)[1], 0, -1)


def pairs(
  coef: Float[Array, "*rows c i"] | None,
  row_scale: Float[Array, "n i"] | None,
  gates: dict[str, Float[Array, "*rows e"]],
  c: int,
  place: Int[Array, " b"] | None,
) -> Float[Array, "*rows c e"]:
  """Coefficients of all pairs of tokens of a batch.

  Args:
    coef: as given, or None for those of `row_scale`.
    row_scale: factors of the steps, by place in the batch.
    gates: of the columns, "step" among them where there is a `row_scale`.
    c: tokens of a row.
    place: of one token in its batch; None for all tokens from the first.
  """
  if place is None:
    if coef is not None:
      return coef[..., :c]
    assert row_scale is not None
    scale = row_scale[:, :c, None]
    step = gates["step"][..., None, :]
    return scale.reshape((1,) * (step.ndim - 3) + scale.shape) * step
  # One token at `place`; column e is the token e - (i - 1) steps from it.
  steps = lambda size: (
    place[:, None] + jnp.arange(1 - size, 1, dtype=jnp.int32)[None]
  )
  if coef is None:
    assert row_scale is not None
    column = steps(row_scale.shape[-1])
    scale = jnp.moveaxis(jnp.take(row_scale, place, axis=1), 0, 1)
    coef = scale[..., None, None] * gates["step"][..., None, :]
  else:
    column = steps(coef.shape[-1])
    index = jnp.maximum(column, 0)[:, None, None]
    index = jnp.broadcast_to(index, coef.shape)
    coef = jnp.take_along_axis(coef, index, axis=-1)
  return jnp.where((column >= 0)[:, None, None], coef, 0.0)


def pairwise(
  coef: Float[Array, "*rows c e"], valid: Bool[Array, "*#rows c"] | None
) -> Coefficients:
  """Coefficients given for every pair: no recurrence, no decay."""
  c, e = coef.shape[-2:]
  causal = jnp.tril(jnp.ones((c, e), bool))
  causal = causal.reshape((1,) * (coef.ndim - 2) + causal.shape)
  write = jnp.where(causal, coef, 0.0)
  if valid is not None:  # rows after the last token repeat
    index = jnp.arange(c, dtype=jnp.int32)
    index = index.reshape((1,) * (valid.ndim - 1) + index.shape)
    last = jax.lax.cummax(jnp.where(valid, index, 0), axis=valid.ndim - 1)
    last = jnp.broadcast_to(last, write.shape[:-1])
    write = jnp.take_along_axis(write, last[..., None], axis=-2)
  return of_pairs(write)


def of_pairs(write: Float[Array, "*rows c e"]) -> Coefficients:
  """Coefficients of all pairs, where nothing else counts."""
  return Coefficients(write=write, end=End(write=write[..., -1, :]))
