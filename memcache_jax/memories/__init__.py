"""Memories: rules for writing keys and values into a state and reading it."""

from memcache_jax.memories._base import Gate, HeadShape, Memory, Tokens
from memcache_jax.memories._cell import Cell
from memcache_jax.memories._deep import (
  TTTMLP,
  Atlas,
  DeepLinear,
  DeepSlidingWindow,
  LaCT,
  Memora,
  Moneta,
  Omega,
  Titans,
  TTTLinear,
  Yaad,
)
from memcache_jax.memories._delta import RWKV7, Delta, GatedDelta
from memcache_jax.memories._linear import (
  DecayedLinear,
  Linear,
  SlidingWindowLinear,
)
from memcache_jax.memories._miras import Miras
from memcache_jax.memories._miras_parts import (
  Optimizer,
  PolynomialFeatures,
  Retention,
  default_step_scale,
)
from memcache_jax.memories._scan_tokens import scan_tokens
from memcache_jax.memories._watch import Watched, watch

__all__ = [
  "RWKV7",
  "TTTMLP",
  "Atlas",
  "Cell",
  "DecayedLinear",
  "DeepLinear",
  "DeepSlidingWindow",
  "Delta",
  "Gate",
  "GatedDelta",
  "HeadShape",
  "LaCT",
  "Linear",
  "Memora",
  "Memory",
  "Miras",
  "Moneta",
  "Omega",
  "Optimizer",
  "PolynomialFeatures",
  "Retention",
  "SlidingWindowLinear",
  "TTTLinear",
  "Titans",
  "Tokens",
  "Watched",
  "Yaad",
  "default_step_scale",
  "scan_tokens",
  "watch",
]
