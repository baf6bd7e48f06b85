"""Linear attention with decay, write strength and a write window."""

from memcache_jax.ops.linear_attention._api import linear_attention
from memcache_jax.ops.linear_attention._state import LinearAttentionState

__all__ = ["LinearAttentionState", "linear_attention"]
