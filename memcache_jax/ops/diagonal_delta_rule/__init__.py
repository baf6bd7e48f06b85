"""The delta rule with a decay per key channel (RWKV-7)."""

from memcache_jax.ops.diagonal_delta_rule._api import diagonal_delta_rule

__all__ = ["diagonal_delta_rule"]
