"""The model: a few equal blocks around the memory of the settings."""

import functools

import jax
from flax import nnx
from jaxtyping import Array, Int

from examples.recall.settings import Settings
from memcache_jax.caching import (
  Aggregator,
  Cached,
  Constant,
  GatedResidual,
  HardTopK,
  Logarithmic,
  MemorySoup,
  Residual,
  SparseSelective,
  StraightThrough,
)
from memcache_jax.memories import (
  DecayedLinear,
  DeepLinear,
  GatedDelta,
  Linear,
  Memory,
  SlidingWindowLinear,
  Titans,
)
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  MixerSpec,
  ModelConfig,
)


def config(settings: Settings) -> ModelConfig:
  """Blocks of the mixer that the settings name."""
  return ModelConfig(
    vocab_size=settings.task.vocab_size,
    dim=settings.dim,
    num_layers=settings.num_layers,
    pattern=(_mixer(settings),),
    hidden_dim=2 * settings.dim,
  )


def _mixer(settings: Settings) -> MixerSpec:
  if settings.memory == "attention":
    # Convolutions like those of the memories: without them two layers have to
    # find each other first, which takes most of the training.
    return AttentionSpec(settings.num_heads, conv_width=settings.conv_width)
  memory = _memory(settings)
  if settings.aggregate != "none":
    kind = Logarithmic if settings.aggregate == "logarithmic" else Constant
    segments = kind(settings.segment_length)
    memory = Cached(
      memory, segments, _aggregator(settings), settings.write_mode
    )
  return MemorySpec(memory, settings.num_heads, conv_width=settings.conv_width)


def _memory(settings: Settings) -> Memory:
  match settings.memory:
    case "linear":
      return Linear()
    case "retnet":
      return DecayedLinear.retnet()
    case "swla":
      return SlidingWindowLinear()
    case "dla":
      return DeepLinear()
    case "titans":
      return Titans()
    case "gated_delta":
      return GatedDelta()


def _aggregator(settings: Settings) -> Aggregator:
  gate = {"gate": settings.gate, "pooling": settings.pooling}
  if settings.gate == "input":
    trained = (stage.length for stage in settings.task.stages)
    longest = max(*trained, *settings.task.tests)
    gate["max_segments"] = -(-longest // settings.segment_length)
  match settings.aggregate:
    case "residual":
      return Residual()
    case "gated_residual" | "logarithmic":
      return GatedResidual(**gate)
    case "soup":
      return MemorySoup(**gate)
    case "sparse":
      hard = settings.selection == "hard"
      selection = HardTopK() if hard else StraightThrough(reads="all")
      return SparseSelective(top_k=2, selection=selection, **gate)


@functools.cache
def structure(settings: Settings) -> nnx.GraphDef:
  """All of the model but its numbers."""
  return nnx.graphdef(nnx.eval_shape(lambda: make(settings, 0)))


def make(settings: Settings, seed: int | Int[Array, ""]) -> LanguageModel:
  """A model with fresh weights."""
  return LanguageModel(config(settings), rngs=nnx.Rngs(jax.random.key(seed)))


def with_params(settings: Settings, params: nnx.State) -> LanguageModel:
  """A model with these weights."""
  return nnx.merge(structure(settings), params)


@functools.partial(jax.jit, static_argnames="settings")
def initial_params(settings: Settings, seed: Int[Array, ""]) -> nnx.State:
  """The weights before the first step; one compilation for all seeds."""
  return nnx.state(make(settings, seed))
