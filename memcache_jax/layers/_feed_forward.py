"""The gated feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import Array, DType, Float
from memcache_jax.layers._params import Projection
from memcache_jax.ops import _checks


class SwiGLU(nnx.Module):
  r"""``(SiLU(x W_gate) * (x W_up)) W_down``, without biases.

  Shazeer (arXiv 2002.05202), with Llama's width.

  Args:
    dim: model width, d.
    hidden_dim: hidden width; by default 8 d / 3 rounded up to a multiple of
      256.
    out_scale: factor on the initial output projection.
    dtype: compute dtype.
    param_dtype: of the stored weights.
    rngs: where the initial weights come from.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import SwiGLU
    >>> layer = SwiGLU(768, rngs=nnx.Rngs(0))
    >>> layer.up.kernel.shape
    (768, 2048)
  """

  def __init__(
    self,
    dim: int,
    hidden_dim: int | None = None,
    *,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    _checks.check_positive(dim=dim)
    _checks.check_number(low=0, out_scale=out_scale)
    if hidden_dim is None:
      hidden_dim = -(-8 * dim // (3 * 256)) * 256
    _checks.check_positive(hidden_dim=hidden_dim)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.gate = Projection("df", (dim, hidden_dim), **options)
    self.up = Projection("df", (dim, hidden_dim), **options)
    self.down = Projection("fd", (hidden_dim, dim), scale=out_scale, **options)

  def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """Transforms every token by itself."""
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
