"""The product of tokens with one map, of their own row or of all rows alike."""

import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Float


def product(
  x: Float[Array, "b n t i"], weights: Float[Array, "_ n i o"], dtype: jnp.dtype
) -> Float[Array, "b n t o"]:
  """``x W``, float32, weights [b n i o] or, shared by all rows, [1 n i o]."""
  if weights.shape[0] == x.shape[0]:
    return numerics.matmul("bnti,bnio->bnto", x, weights, dtype=dtype)
  # Rows and tokens are one axis: XLA for CPUs has no product of bfloat16 that
  # leaves two axes of one operand.
  b, n, t, i = x.shape
  tokens = jnp.swapaxes(x, 0, 1).reshape(n, b * t, i)
  y = numerics.matmul("nti,nio->nto", tokens, weights[0], dtype=dtype)
  return jnp.swapaxes(y.reshape(n, b, t, -1), 0, 1)
