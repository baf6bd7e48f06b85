"""How Titans joins attention and memory."""

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import Array, DType, Float
from memcache_jax.layers._norm import RMSNorm


class BranchGate(nnx.Module):
  r"""One branch, gated by another.

  .. math:: o = \mathrm{RMSNorm}(y) \odot \sigma(\mathrm{RMSNorm}(m))

  Titans (arXiv 2501.00663), section 4.2: both normalised with learned scales,
  and a nonlinearity. Only y starts small, with `out_scale`.
  """

  def __init__(self, dim: int, out_scale: float, param_dtype: DType):
    self.norm = RMSNorm(dim, start=out_scale, param_dtype=param_dtype)
    self.gate_norm = RMSNorm(dim, param_dtype=param_dtype)

  def __call__(
    self, y: Float[Array, "b t d"], m: Float[Array, "b t d"]
  ) -> Float[Array, "b t d"]:
    """Gates in float32; the result has the dtype of y."""
    gate = jax.nn.sigmoid(self.gate_norm(m).astype(jnp.float32))
    return (self.norm(y).astype(jnp.float32) * gate).astype(y.dtype)
