"""Kinds of parameters, how they start, and which ones decay."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax import numerics
from memcache_jax.array_typing import Array, DType, Float

# Standard deviation of every weight at the start, before any scale.
WEIGHT_STD = 0.02


class NoDecayParam(nnx.Param):
  """A parameter that weight decay must leave alone.

  Scales of norms, biases, decay rates and time steps: numbers that are not
  weights of a sum, and that decay would pull to a meaningless 0.
  """


class InitialMemory(NoDecayParam):
  """A learned parameter of a memory: what it holds before the first token."""


def weight_decay_mask(params: Any) -> Any:
  """True for the parameters that weight decay applies to.

  Args:
    params: a module or what `nnx.split` and `nnx.state` return of it.

  Returns:
    The same tree with a bool in place of every variable; what
    `optax.adamw(mask=...)` takes.

  Example:
    >>> from flax import nnx
    >>> from memcache_jax.layers import RMSNorm, weight_decay_mask
    >>> params = nnx.state(RMSNorm(4), nnx.Param)
    >>> weight_decay_mask(params)["scale"]
    False
  """
  return jax.tree.map(
    lambda variable: not isinstance(variable, NoDecayParam),
    params,
    is_leaf=lambda x: isinstance(x, nnx.Variable),
  )


def normal(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  dtype: DType,
  *,
  std: float = WEIGHT_STD,
) -> Float[Array, "..."]:
  """Draws a weight."""
  return std * jax.random.normal(rngs.params(), shape, dtype)


class Projection(nnx.Module):
  """A linear map whose axes have names: ``Projection("dnk", ...)``.

  Attributes:
    kernel: the weight; its axes are the letters of `axes`, those that are
      summed over first.

  Args:
    axes: letters of the kernel, in the library's alphabet. The name by which
      a mesh layout can be assigned to it.
    shape: their sizes.
    contract: how many leading axes are summed over.
    scale: factor on the standard deviation of 0.02 at the start.
    dtype: of the operands of the product.
    param_dtype: of the stored kernel.
    rngs: where the initial weights come from.
  """

  def __init__(
    self,
    axes: str,
    shape: tuple[int, ...],
    *,
    contract: int = 1,
    scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.axes = axes
    self.contract = contract
    self.dtype = dtype
    std = WEIGHT_STD * scale
    self.kernel = nnx.Param(normal(rngs, shape, param_dtype, std=std))

  def __call__(
    self, x: Float[Array, "b t ..."], out_dtype: DType | None = None
  ) -> Float[Array, "b t ..."]:
    """Multiplies; accumulates in float32, returns `out_dtype` or `dtype`."""
    summed, kept = self.axes[: self.contract], self.axes[self.contract :]
    kernel = self.kernel[...]
    y = numerics.matmul_tokens(
      f"{summed},{self.axes}->{kept}", x, kernel, dtype=self.dtype
    )
    return y.astype(self.dtype if out_dtype is None else out_dtype)
