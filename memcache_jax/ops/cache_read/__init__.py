"""Gated read of many stored matrix memories, or of a few selected ones."""

from memcache_jax.ops.cache_read._api import cache_read
from memcache_jax.ops.cache_read._one_token import read_one_token
from memcache_jax.ops.cache_read._selected import selected_read

__all__ = ["cache_read", "read_one_token", "selected_read"]
