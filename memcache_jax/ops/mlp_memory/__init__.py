"""Memories that are small networks, trained by gradient as they read."""

from memcache_jax.ops.mlp_memory._api import mlp_memory
from memcache_jax.ops.mlp_memory._architecture import (
  MLP,
  AffineShape,
  Architecture,
  GatedMLP,
  apply_architecture,
)
from memcache_jax.ops.mlp_memory._closing import (
  Closing,
  EntropyClosing,
  MuonClosing,
  NormClosing,
  orthogonalize,
)
from memcache_jax.ops.mlp_memory._loss import L2, Dot, Huber, InnerLoss, Lp
from memcache_jax.ops.mlp_memory._read_many import read_networks
from memcache_jax.ops.mlp_memory._read_selected import read_selected_networks
from memcache_jax.ops.mlp_memory._state import (
  Mix,
  MLPMemoryState,
  Tail,
  init_state,
  make_rule,
)

__all__ = [
  "L2",
  "MLP",
  "AffineShape",
  "Architecture",
  "Closing",
  "Dot",
  "EntropyClosing",
  "GatedMLP",
  "Huber",
  "InnerLoss",
  "Lp",
  "MLPMemoryState",
  "Mix",
  "MuonClosing",
  "NormClosing",
  "Tail",
  "apply_architecture",
  "init_state",
  "make_rule",
  "mlp_memory",
  "orthogonalize",
  "read_networks",
  "read_selected_networks",
]
