"""Token embedding, and the same matrix as output layer."""

import functools

import jax.numpy as jnp
from flax import nnx

from memcache_jax import numerics, sharding
from memcache_jax.array_typing import Array, Bool, DType, Float, Int
from memcache_jax.layers._params import normal


class Embedding(nnx.Module):
  """A vector per token id; ids out of range give nan, not another's vector.

  Args:
    vocab_size: rows of the table.
    dim: model width.
    dtype: of the vectors.
    param_dtype: of the stored table.
    rngs: where the initial weights come from.
  """

  def __init__(
    self,
    vocab_size: int,
    dim: int,
    *,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dtype = dtype
    self.table = nnx.Param(normal(rngs, (vocab_size, dim), param_dtype))

  def __call__(
    self, tokens: Int[Array, "b t"], mask: Bool[Array, "b t"] | None = None
  ) -> Float[Array, "b t d"]:
    """Looks ids up; masked tokens get zeros, whatever their id."""
    tokens = jnp.asarray(tokens)  # NumPy's int64 as what jax makes of it
    if mask is not None:
      tokens = jnp.where(mask, tokens, 0)
    x = sharding.by_compiler(
      functools.partial(jnp.take, axis=0, mode="fill", fill_value=jnp.nan),
      sharding.beside(self.table[...], tokens),
      # Beyond the last row instead of counting from the end.
      jnp.where(tokens < 0, jnp.iinfo(tokens.dtype).max, tokens),
      spec=(*sharding.spec_of(tokens), None),
    ).astype(self.dtype)
    return x if mask is None else jnp.where(mask[..., None], x, 0)

  def attend(self, x: Float[Array, "b t d"]) -> Float[Array, "b t vocab"]:
    """Inner products with every row, float32."""
    return numerics.matmul_tokens(
      "d,ld->l", x, self.table[...], dtype=self.dtype
    )
