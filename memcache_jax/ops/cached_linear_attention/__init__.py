"""Linear attention by segments that also reads earlier segments' states."""

from memcache_jax.ops.cached_linear_attention._api import (
  cached_linear_attention,
)
from memcache_jax.ops.cached_linear_attention._kernels import has_kernel

__all__ = ["cached_linear_attention", "has_kernel"]
