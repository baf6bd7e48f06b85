"""Gated read of many stored matrix memories, or of a few selected ones."""

from memcache_jax.ops.cache_read._api import cache_read
from memcache_jax.ops.cache_read._selected import selected_read

__all__ = ["cache_read", "selected_read"]
