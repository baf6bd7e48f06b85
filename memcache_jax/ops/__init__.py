"""Pure functions of arrays; the only place where memories meet hardware."""

from memcache_jax.ops.cache_read import cache_read
from memcache_jax.ops.cached_linear_attention import cached_linear_attention
from memcache_jax.ops.delta_rule import delta_rule
from memcache_jax.ops.diagonal_delta_rule import diagonal_delta_rule
from memcache_jax.ops.linear_attention import (
  LinearAttentionState,
  linear_attention,
)

__all__ = [
  "LinearAttentionState",
  "cache_read",
  "cached_linear_attention",
  "delta_rule",
  "diagonal_delta_rule",
  "linear_attention",
]
