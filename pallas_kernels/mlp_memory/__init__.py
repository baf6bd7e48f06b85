"""Gated reads of stored networks.

The equations are in the README of the op, `memcache_jax/ops/mlp_memory`.
"""

__all__: list[str] = []
