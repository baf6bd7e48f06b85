"""Settings -> `ModelConfig`: the models of Memory Caching, Table 1."""

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
  "segments": jax.checkpoint_policies.save_only_these_names("segment_ends"),
}


def model_config(settings: ModelSettings) -> ModelConfig:
  """The model that settings describe.

  Raises:
    InputError: for a family or a kind of caching that does not exist.
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
    "samba": ModelConfig.samba,
    "retnet": ModelConfig.retnet,
    "deltanet": ModelConfig.deltanet,
    "rwkv7": ModelConfig.rwkv7,
  }
  if settings.family not in baselines:
    return ModelConfig.recurrent(size, _cached(_memory(settings), settings))
  if settings.caching != "none":
    raise InputError(
      f"model.caching must be none with {settings.family}: "
      f"got {settings.caching!r}"
    )
  return baselines[settings.family](size)


def _memory(settings: ModelSettings) -> Memory:
  match settings.family:
    case "swla":
      return SlidingWindowLinear()
    case "dla":
      return DeepLinear(inner_batch=settings.inner_batch)
    case "titans":
      return Titans(inner_batch=settings.inner_batch)
    case "memora":
      return Memora(inner_batch=settings.inner_batch)
  raise InputError(
    "model.family must be transformer, samba, retnet, deltanet, rwkv7, memora, "
    f"swla, dla or titans: got {settings.family!r}"
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
