"""The model: bytes through a few blocks with a cached memory each."""

from flax import nnx

from examples import functional
from examples.quickstart.settings import Settings
from memcache_jax.caching import Cached, Constant, GatedResidual
from memcache_jax.memories import DecayedLinear
from memcache_jax.models import LanguageModel, MemorySpec, ModelConfig

BYTE_VALUES = 256


def config(settings: Settings) -> ModelConfig:
  """A decaying linear memory, cached at the end of every segment."""
  memory = Cached(
    DecayedLinear(chunk_size=settings.segment_length),
    Constant(settings.segment_length),
    GatedResidual(),
  )
  return ModelConfig(
    vocab_size=BYTE_VALUES,
    dim=settings.dim,
    num_layers=settings.num_layers,
    pattern=(MemorySpec(memory, settings.num_heads),),
    hidden_dim=settings.hidden_dim,
  )


def structure(settings: Settings) -> nnx.GraphDef:
  """All of the model but its numbers."""
  return functional.structure(config(settings))


def with_params(settings: Settings, params: nnx.State) -> LanguageModel:
  """A model with these weights."""
  return functional.with_params(config(settings), params)


def initial_params(settings: Settings) -> nnx.State:
  """The weights before the first step."""
  return functional.initial_params(config(settings), settings.seed)
