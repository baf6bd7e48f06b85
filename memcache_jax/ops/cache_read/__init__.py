"""Gated read of many stored matrix memories."""

from memcache_jax.ops.cache_read._api import cache_read

__all__ = ["cache_read"]
