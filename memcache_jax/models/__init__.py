"""Language models from frozen configs."""

from memcache_jax.models._config import ModelConfig, Size
from memcache_jax.models._embedding import Embedding
from memcache_jax.models._inspection import (
  MemoryReport,
  memory_reports,
  segment_gates,
  selection_reports,
)
from memcache_jax.models._language_model import LanguageModel
from memcache_jax.models._loss import next_token_loss
from memcache_jax.models._specs import (
  AttentionSpec,
  MemoryAsContextSpec,
  MemoryAsGateSpec,
  MemorySpec,
  MixerSpec,
)
from memcache_jax.models._tokens import check_token_ids

__all__ = [
  "AttentionSpec",
  "Embedding",
  "LanguageModel",
  "MemoryAsContextSpec",
  "MemoryAsGateSpec",
  "MemoryReport",
  "MemorySpec",
  "MixerSpec",
  "ModelConfig",
  "Size",
  "check_token_ids",
  "memory_reports",
  "next_token_loss",
  "segment_gates",
  "selection_reports",
]
