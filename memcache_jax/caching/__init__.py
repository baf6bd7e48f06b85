"""Caching: wraps any memory so that it grows with the sequence."""

from memcache_jax.caching._aggregators import (
  Aggregator,
  GatedResidual,
  MemorySoup,
  MovingAverage,
  Residual,
  SparseSelective,
)
from memcache_jax.caching._cached import Cached, CacheState
from memcache_jax.caching._segments import (
  Constant,
  Explicit,
  Logarithmic,
  Segments,
)

__all__ = [
  "Aggregator",
  "CacheState",
  "Cached",
  "Constant",
  "Explicit",
  "GatedResidual",
  "Logarithmic",
  "MemorySoup",
  "MovingAverage",
  "Residual",
  "Segments",
  "SparseSelective",
]
