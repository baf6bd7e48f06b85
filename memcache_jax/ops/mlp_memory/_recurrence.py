"""Two recurrences over the rows of a batch, one feeding the other.

Each is a product with a triangular matrix, of the products of the factors of
all rows in between: never a quotient, hence exact for factors of 0, and so is
the derivative. That is the same recurrences again, so that nothing is
differentiated through the way in which products are found.
"""

import jax
import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Float


@jax.custom_jvp
def recur(
  step: Float[Array, "*rows c e"],
  decay: Float[Array, "*rows c"] | None,
  momentum: Float[Array, "*rows c"] | None,
  added: Float[Array, "*rows c"] | None,
) -> tuple[Float[Array, "*rows c e"], Float[Array, "*rows c e"]]:
  """``u_r = m_r u_{r-1} + step_r`` and ``c_r = a_r c_{r-1} + u_r``.

  Before the first row, c is 1 in column 0 and u is 1 in column 1.

  Args:
    step: what is added at each row.
    decay: a; None for 1.
    momentum: m; None for 0.
    added: factors of u_r in c_r; None for 1.

  Returns:
    c and u, of all rows.
  """
  written, past = step, None
  if momentum is not None:
    past = _products(momentum)
    written = _times(past, step + _first(step, 1, momentum))
  kept, sums = _running(decay, step), _added(written, added)
  if decay is not None:
    sums = sums + _first(step, 0, decay)
  return _times(kept, sums), written


@recur.defjvp
def _(primals, tangents):
  step, decay, momentum, added = primals
  d_step, d_decay, d_momentum, _ = tangents
  out, written = recur(*primals)
  d_written = d_step
  if momentum is not None:
    before = _before(written, 1)
    d_written = d_step + numerics.scale_rows(before, d_momentum)
    d_written = _times(_products(momentum), d_written)
  d_sums = _added(d_written, added)
  if decay is not None:
    d_sums = d_sums + numerics.scale_rows(_before(out, 0), d_decay)
  return (out, written), (_times(_running(decay, step), d_sums), d_written)


def _products(x: Float[Array, "*rows c"]) -> Float[Array, "*rows c d"]:
  """At r, j: the product of x_{j+1}, ..., x_r; 0 for j > r.

  Two halves are joined by the last row of the one and, times the number
  between them, the first column of the other.
  """
  c = x.shape[-1]
  x = jnp.pad(
    x,
    [(0, 0)] * (x.ndim - 1) + [(0, (1 << (c - 1).bit_length()) - c)],
    constant_values=1.0,
  )
  blocks = jnp.ones_like(x)[..., None, None]
  while (count := blocks.shape[-3]) > 1:
    size = blocks.shape[-1]
    halves = blocks.reshape(*x.shape[:-1], count // 2, 2, size, size)
    upper, lower = halves[..., 0, :, :], halves[..., 1, :, :]
    between = x.reshape(*x.shape[:-1], count // 2, 2, size)[..., 1, :1, None]
    joint = (between * lower[..., :, :1]) * upper[..., -1:, :]
    blocks = jnp.concatenate(
      [
        jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
        jnp.concatenate([joint, lower], axis=-1),
      ],
      axis=-2,
    )
  return blocks[..., 0, :c, :c]


def _running(decay, step):
  """`_products`; of ones where there is no decay."""
  if decay is not None:
    return _products(decay)
  return _products(jnp.ones_like(step[..., 0]))


def _times(matrix, x):
  return jnp.einsum("...rj,...je->...re", matrix, x, precision="highest")


def _added(x, added):
  return x if added is None else added[..., None] * x


def _first(like, column, scale):
  """What multiplies a column's 1 from before, at the first row; else 0."""
  c, e = like.shape[-2:]
  place = jnp.zeros((c, e), like.dtype).at[0, column].set(1.0)
  place = place.reshape((1,) * (like.ndim - 2) + (c, e))
  return place * scale[..., None]


def _before(x, column):
  """Rows one later; before the first, 1 in the column."""
  first = jnp.zeros_like(x[..., :1, :]).at[..., column].set(1.0)
  return jnp.concatenate([first, x[..., :-1, :]], axis=-2)
