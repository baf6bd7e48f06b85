"""Normalisation by the root mean square."""

import jax.numpy as jnp
from flax import nnx

from memcache_jax import numerics
from memcache_jax.array_typing import Array, DType, Float
from memcache_jax.layers._params import NoDecayParam


class RMSNorm(nnx.Module):
  """``x / rms(x) * scale`` over the last axis, computed in float32.

  Args:
    shape: of the scale: the width of the last axis, or trailing axes of
      which only the last is normalised, such as (heads, value width).
    eps: added to the mean square.
    start: of the scale.
    param_dtype: of the scale.

  Example:
    >>> import jax.numpy as jnp
    >>> from memcache_jax.layers import RMSNorm
    >>> RMSNorm(2)(jnp.array([[[3.0, 3.0]]])).round(3).tolist()
    [[[1.0, 1.0]]]
  """

  def __init__(
    self,
    shape: int | tuple[int, ...],
    *,
    eps: float = 1e-6,
    start: float = 1.0,
    param_dtype: DType = jnp.float32,
  ):
    shape = (shape,) if isinstance(shape, int) else shape
    self.eps = eps
    self.scale = NoDecayParam(jnp.full(shape, start, param_dtype))

  def __call__(self, x: Float[Array, "b t ..."]) -> Float[Array, "b t ..."]:
    """Normalises; the result has the dtype of x."""
    return numerics.rms_norm(x, self.scale[...], self.eps)
