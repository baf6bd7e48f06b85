"""Memories: rules for writing keys and values into a state and reading it."""

from memcache_jax.memories._base import (
  Gate,
  HeadShape,
  Memory,
  Tokens,
  scan_tokens,
)
from memcache_jax.memories._linear import (
  DecayedLinear,
  Linear,
  SlidingWindowLinear,
)

__all__ = [
  "DecayedLinear",
  "Gate",
  "HeadShape",
  "Linear",
  "Memory",
  "SlidingWindowLinear",
  "Tokens",
  "scan_tokens",
]
