"""Settings -> `ModelConfig`: the models of Memory Caching, Tables 1 and 3."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.lm.settings import ModelSettings
from examples.workdir import InputError
from memcache_jax.caching import (
  Aggregator,
  Cached,
  Constant,
  GatedResidual,
  Logarithmic,
  MemorySoup,
  SparseSelective,
)
from memcache_jax.memories import (
  DeepLinear,
  Memora,
  Memory,
  SlidingWindowLinear,
  Titans,
)
from memcache_jax.models import ModelConfig, Size

# Made once: a policy equals no other.
_REMAT = {
  "none": False,
  "blocks": True,
  "segments": jax.checkpoint_policies.save_only_these_names(
    "segment_ends", "batch_starts", "reads"
  ),
}


def model_config(settings: ModelSettings) -> ModelConfig:
  """The model that settings describe.

  Raises:
    InputError: for a family or a kind of caching that does not exist, or not
      together.
  """
  if settings.remat not in _REMAT:
    raise InputError(
      f"model.remat must be none, blocks or segments: got {settings.remat!r}"
    )
  size = Size(
    dim=settings.dim,
    num_layers=settings.num_layers,
    num_heads=settings.num_heads,
    hidden_dim=settings.hidden_dim or None,
    vocab_size=settings.vocab_size,
    tie_embeddings=settings.tie_embeddings,
    dtype=jnp.dtype(settings.dtype),
    remat=_REMAT[settings.remat],
  )
  baselines = {
    "transformer": ModelConfig.transformer,
    "samba": functools.partial(ModelConfig.samba, window=settings.window),
    "retnet": ModelConfig.retnet,
    "deltanet": ModelConfig.deltanet,
    "rwkv7": ModelConfig.rwkv7,
  }
  if settings.family in (*baselines, "titans_mac") and (
    settings.caching != "none"
  ):
    raise InputError(
      f"model.caching must be none with {settings.family}: "
      f"got {settings.caching!r}"
    )
  if settings.family in baselines and settings.implementation:
    raise InputError(
      f"model.implementation must be empty with {settings.family}: "
      f"got {settings.implementation!r}"
    )
  if settings.family in baselines:
    return baselines[settings.family](size)
  memory = _cached(_memory(settings), settings)
  match settings.family:
    case "titans_mac":
      return ModelConfig.titans_mac(size, memory, settings.segment_length)
    case "titans_mag":
      return ModelConfig.titans_mag(size, memory, settings.window)
    case "titans_mal":
      return ModelConfig.titans_mal(size, memory, settings.window)
  return ModelConfig.recurrent(size, memory)


def _memory(settings: ModelSettings) -> Memory:
  implementation: Any = settings.implementation or None
  deep = {
    "inner_batch": settings.inner_batch,
    "max_kept_bytes": settings.max_kept_bytes,
    "implementation": implementation,
  }
  match settings.family:
    case "swla":
      return SlidingWindowLinear(implementation=implementation)
    case "dla":
      return DeepLinear(**deep)
    case "titans" | "titans_mac" | "titans_mag" | "titans_mal":
      return Titans(**deep)
    case "memora":
      return Memora(**deep)
  raise InputError(
    "model.family must be transformer, samba, retnet, deltanet, rwkv7, memora, "
    "swla, dla, titans, titans_mac, titans_mag or titans_mal: "
    f"got {settings.family!r}"
  )


def _cached(memory: Memory, settings: ModelSettings) -> Memory:
  segments = Constant(settings.segment_length)
  match settings.caching:
    case "none":
      return memory
    case "log":  # Log-Linear++ in the paper
      segments = Logarithmic(settings.segment_length)
      aggregate: Aggregator = GatedResidual()
    case "grm":
      aggregate = GatedResidual()
    case "soup":
      aggregate = MemorySoup()
    case "ssc":
      aggregate = SparseSelective(top_k=settings.top_k)
    case other:
      raise InputError(
        f"model.caching must be none, log, grm, soup or ssc: got {other!r}"
      )
  mode = settings.write_mode
  if mode not in ("independent", "checkpoint"):
    raise InputError(
      f"model.write_mode must be independent or checkpoint: got {mode!r}"
    )
  return Cached(memory, segments, aggregate, mode)
