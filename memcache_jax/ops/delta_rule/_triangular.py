"""Systems with a unit lower triangular matrix, many small ones at once."""

from functools import partial

import jax
import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, DType, Float

# Below this size all blocks of a tile are inverted in one matmul, masked:
# blocks of 1, 2 or 4 rows would leave vector and matrix units idle.
_TILE = 8


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def solve(
  strict: Float[Array, "*batch c c"],
  right: Float[Array, "*batch c k"],
  dtype: DType,
) -> Float[Array, "*batch c k"]:
  """``(I + strict)^-1 right`` for strictly lower triangular matrices.

  Its derivative reuses the inverse, ``d x = inverse (d right - d strict x)``,
  and may itself be differentiated.

  Args:
    strict: zero on and above the diagonal, float32; c a power of two.
    right: right-hand sides.
    dtype: of the operands of the product with the inverse, which itself is
      always computed in float32.
  """
  return _product(invert(strict), right, dtype)


@solve.defjvp
def _solve_jvp(dtype, primals, tangents):
  strict, right = primals
  d_strict, d_right = tangents
  inverse = invert(strict)
  x = _product(inverse, right, dtype)
  d_x = _product(inverse, d_right - _product(d_strict, x, dtype), dtype)
  return x, d_x


def _product(a, b, dtype):
  return numerics.matmul("...ce,...ek->...ck", a, b, dtype=dtype)


@jax.custom_jvp
def invert(strict: Float[Array, "*batch c c"]) -> Float[Array, "*batch c c"]:
  r"""``(I + strict)^-1``, by halves.

  .. math::
    \begin{pmatrix} A & 0 \\ C & B \end{pmatrix}^{-1} =
    \begin{pmatrix} A^{-1} & 0 \\ -B^{-1} C A^{-1} & B^{-1} \end{pmatrix}

  Every factor is part of the inverse itself, hence no larger than it. (The
  power series of the inverse also takes log2(c) matmuls, but its terms cancel:
  for equal keys they reach binomial coefficients.)
  """
  size = strict.shape[-1]
  tile = min(_TILE, size)
  inverse = _invert_tiles(_diagonal_blocks(strict, tile))
  while tile < size:
    tile *= 2
    below = _diagonal_blocks(strict, tile)[..., tile // 2 :, : tile // 2]
    upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    below = -_exact(lower, _exact(below, upper))
    inverse = stack_blocks(upper, below, lower)
  return inverse[..., 0, :, :]


@invert.defjvp
def _invert_jvp(primals, tangents):
  inverse = invert(*primals)
  return inverse, -_exact(_exact(inverse, *tangents), inverse)


def stack_blocks(
  upper: Float[Array, "*batch c c"],
  below: Float[Array, "*batch c c"],
  lower: Float[Array, "*batch c c"],
) -> Float[Array, "*batch 2*c 2*c"]:
  """The matrix ``[[upper, 0], [below, lower]]``."""
  top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
  return jnp.concatenate([top, jnp.concatenate([below, lower], -1)], axis=-2)


def _invert_tiles(strict):
  """The same recursion for small matrices, all pairs of a level at once."""
  size = strict.shape[-1]
  row = jnp.arange(size)[:, None]
  inverse = jnp.eye(size, dtype=strict.dtype)
  inverse = jnp.broadcast_to(inverse, strict.shape)
  half = 1
  while half < size:
    # Pairs of neighbours: in the same block of 2 * half, not in one of half.
    pair = (row // (2 * half) == row.T // (2 * half)) & (
      row // half != row.T // half
    )
    below = strict * pair.astype(strict.dtype).reshape(
      (1,) * (strict.ndim - 2) + pair.shape
    )
    inverse -= _exact(_exact(inverse, below), inverse)
    half *= 2
  return inverse


def _diagonal_blocks(x, size):
  """Blocks [batch, blocks, size, size] on the diagonal of [batch, c, c]."""
  count = x.shape[-1] // size
  x = x.reshape(*x.shape[:-2], count, size, count, size)
  return jnp.moveaxis(jnp.diagonal(x, axis1=-4, axis2=-2), -1, -3)


def _exact(a, b):
  return jnp.matmul(a, b, precision="highest")
