"""Memory Caching for JAX: recurrent memories that grow with the sequence."""

from memcache_jax import (
  caching,
  decoding,
  layers,
  memories,
  models,
  ops,
  tasks,
)
from memcache_jax.token_layout import document_starts
from memcache_jax.version import __version__

__all__ = [
  "__version__",
  "caching",
  "decoding",
  "document_starts",
  "layers",
  "memories",
  "models",
  "ops",
  "tasks",
]
