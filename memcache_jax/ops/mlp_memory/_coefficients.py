"""The scalars of an inner batch: how much of what each of its rows reads.

With all gradients G_i of a batch taken at its start, the recurrences

  S_r = m_r S_{r-1} - sum_i E[r, i] G_i,      theta_r = a_r theta_{r-1} + S_r

unroll to theta_r = A_r theta_0 + B_r S_0 - sum_i C[r, i] G_i. A, B and C obey
the same two recurrences, so they are run row by row, for all batches at once:
products only, hence exact for decays and momenta of 0, with the right gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float, Int

# Of the loop over rows, at most: on a TPU a step takes longer than a row.
_STEPS = 16


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


def _columns(c: int, window: int) -> Float[Array, "c w e"]:
  """At which columns the steps of each row stand, as ones among zeros.

  Token i is written at the steps i, ..., i + w - 1; the w - 1 tokens before the
  batch are the first columns.
  """
  row, offset, column = (
    jnp.arange(size).reshape(shape)
    for size, shape in (
      (c, (-1, 1, 1)),
      (window, (1, -1, 1)),
      (c + window - 1, (1, 1, -1)),
    )
  )
  return (column == row + window - 1 - offset).astype(jnp.float32)


def recur(
  step: Float[Array, "*rows c w"],
  decay: Float[Array, "*rows c"] | None,
  momentum: Float[Array, "*rows c"] | None,
  valid: Bool[Array, "*#rows c"] | None,
  ages: Float[Array, "*#rows c"] | None,
) -> Coefficients:
  """Runs the two recurrences of the module's top.

  Args:
    step: of the token so many steps before.
    decay: a, in [0, 1]; None for 1.
    momentum: m, in [0, 1]; None for 0.
    valid: rows that exist, None for all; others change nothing.
    ages: tokens of the document before each; None where there is no window.
  """
  c, window = step.shape[-2:]
  if ages is not None:
    # A window does not reach over a document start.
    offsets = jnp.arange(window, dtype=jnp.float32)
    offsets = offsets.reshape((1,) * ages.ndim + offsets.shape)
    step = jnp.where(ages[..., None] >= offsets, step, 0.0)
  columns = _columns(c, window)

  def spread(step, columns):  # a row of E; the whole would be as large as C
    return jnp.einsum("...w,we->...e", step, columns, precision="highest")

  ones = jnp.ones_like(step[..., 0, 0])
  zeros = jnp.zeros_like(spread(step[..., 0, :], columns[0]))
  has_momentum = momentum is not None
  first = End(
    decay=None if decay is None else ones,
    carry=jnp.zeros_like(ones) if has_momentum else None,
    write=zeros,
    momentum_decay=ones if has_momentum else None,
    momentum_write=zeros if has_momentum else None,
  )

  def advance(old, inputs):
    step, columns, a, m, keep = inputs
    row = spread(step, columns)
    forget = lambda a, x: x if a is None else _outer(a, x) * x
    new = End(
      decay=None if a is None else a * old.decay,
      carry=None,
      write=forget(a, old.write) + row,
      momentum_decay=None,
      momentum_write=None,
    )
    if m is not None:
      momentum_decay = m * old.momentum_decay
      written = forget(m, old.momentum_write) + row
      new = new._replace(
        carry=forget(a, old.carry) + momentum_decay,
        write=forget(a, old.write) + written,
        momentum_decay=momentum_decay,
        momentum_write=written,
      )
    if keep is not None:
      new = jax.tree.map(lambda x, y: _where(keep, x, y), new, old)
    return new, (new.decay, new.carry, new.write)

  front = lambda x, axis: None if x is None else jnp.moveaxis(x, axis, 0)
  inputs = (
    front(step, -2),
    columns,
    front(decay, -1),
    front(momentum, -1),
    front(valid, -1),
  )
  end, (decay, carry, write) = jax.lax.scan(
    advance, first, inputs, unroll=max(1, c // _STEPS)
  )
  back = lambda x, axis: None if x is None else jnp.moveaxis(x, 0, axis)
  return Coefficients(back(decay, -1), back(carry, -1), back(write, -2), end)


def without_reads(
  step: Float[Array, "*rows c w"],
  decay: Float[Array, "*rows c"] | None,
  momentum: Float[Array, "*rows c"] | None,
  valid: Bool[Array, "*#rows c"] | None,
  ages: Float[Array, "*#rows c"] | None,
  *,
  adds_up: bool,
) -> Coefficients:
  """The coefficients where reads do not see their own batch: no matrices.

  Args:
    step: as in `recur`, like those up to `ages`.
    decay: a.
    momentum: m.
    valid: rows that exist.
    ages: tokens of the document before each.
    adds_up: whether the momentum is added to the weights at every row; False
      where the closing of the batch does that.
  """
  if valid is not None:
    step = jnp.where(valid[..., None], step, 0.0)
    keep = lambda x: None if x is None else jnp.where(valid, x, 1.0)
    decay, momentum = keep(decay), keep(momentum)
  axis, window = step.ndim - 2, step.shape[-1]

  def later(x):  # product over the rows after each
    x = jnp.concatenate([x[..., 1:], jnp.ones_like(x[..., :1])], axis=-1)
    return jax.lax.cumprod(x, axis=axis, reverse=True)

  def written(weight):  # at each row, spread over the tokens it writes
    total = jnp.zeros((), jnp.float32)
    for offset in range(window):
      part = weight * step[..., offset]
      if ages is not None:
        part = jnp.where(ages >= offset, part, 0.0)
      pad = [(0, 0)] * axis + [(window - 1 - offset, offset)]
      total = total + jnp.pad(part, pad)
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
    kept = kept if valid is None else jnp.where(valid, kept, 0.0)
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


def _outer(scalar, like):
  return scalar.reshape(scalar.shape + (1,) * (like.ndim - scalar.ndim))


def _where(keep, new, old):
  return jnp.where(_outer(keep, new), new, old)
