"""Gated reads of stored matrix memories, of any origin.

Kernels work on arrays with heads before tokens, and on gates with tokens last,
whose layouts need no copies inside of them. The equations are in the README of
the op, `memcache_jax/ops/cache_read`.
"""

__all__: list[str] = []
