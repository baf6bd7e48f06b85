"""The (gated) delta rule on a matrix memory."""

from memcache_jax.ops.delta_rule._api import delta_rule

__all__ = ["delta_rule"]
