"""Caching: wraps any memory so that it grows with the sequence."""

from memcache_jax.caching._aggregators import (
  Aggregator,
  GatedResidual,
  MemorySoup,
  MovingAverage,
  Residual,
)
from memcache_jax.caching._cached import Cached, CacheState
from memcache_jax.caching._policies import (
  CachePolicy,
  DropOldest,
  KeepMostUsed,
  LogarithmicThinning,
  MergeNeighbours,
)
from memcache_jax.caching._segments import (
  Constant,
  Explicit,
  Logarithmic,
  Segments,
)
from memcache_jax.caching._selection import (
  GumbelTopK,
  HardTopK,
  StraightThrough,
)
from memcache_jax.caching._sparse_selective import SparseSelective

__all__ = [
  "Aggregator",
  "CachePolicy",
  "CacheState",
  "Cached",
  "Constant",
  "DropOldest",
  "Explicit",
  "GatedResidual",
  "GumbelTopK",
  "HardTopK",
  "KeepMostUsed",
  "Logarithmic",
  "LogarithmicThinning",
  "MemorySoup",
  "MergeNeighbours",
  "MovingAverage",
  "Residual",
  "Segments",
  "SparseSelective",
  "StraightThrough",
]
