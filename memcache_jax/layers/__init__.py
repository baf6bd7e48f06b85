"""Layers: parameters around memories and attention, with explicit state."""

from memcache_jax.layers._attention import Attention
from memcache_jax.layers._attention_state import AttentionState
from memcache_jax.layers._base import Mixer
from memcache_jax.layers._block import Block
from memcache_jax.layers._feed_forward import SwiGLU
from memcache_jax.layers._gates import Gates
from memcache_jax.layers._memory_as_context import (
  MemoryAsContext,
  MemoryAsContextState,
)
from memcache_jax.layers._memory_as_gate import MemoryAsGate, MemoryAsGateState
from memcache_jax.layers._memory_mixer import MemoryMixer, MixerState
from memcache_jax.layers._norm import RMSNorm
from memcache_jax.layers._params import (
  InitialMemory,
  NoDecayParam,
  Projection,
  weight_decay_mask,
)
from memcache_jax.layers._short_conv import ShortConv

__all__ = [
  "Attention",
  "AttentionState",
  "Block",
  "Gates",
  "InitialMemory",
  "MemoryAsContext",
  "MemoryAsContextState",
  "MemoryAsGate",
  "MemoryAsGateState",
  "MemoryMixer",
  "Mixer",
  "MixerState",
  "NoDecayParam",
  "Projection",
  "RMSNorm",
  "ShortConv",
  "SwiGLU",
  "weight_decay_mask",
]
