"""A language model as a function of its weights, which jax can transform."""

import functools

import jax
from flax import nnx

from memcache_jax.models import LanguageModel, ModelConfig


def make(config: ModelConfig, seed: int = 0) -> LanguageModel:
  """A model with fresh weights."""
  return LanguageModel(config, rngs=nnx.Rngs(seed))


def abstract(config: ModelConfig) -> LanguageModel:
  """A model with shapes in place of weights."""
  return nnx.eval_shape(lambda: make(config))


@functools.cache
def structure(config: ModelConfig) -> nnx.GraphDef:
  """All of the model but its numbers."""
  return nnx.graphdef(abstract(config))


def with_params(config: ModelConfig, params: nnx.State) -> LanguageModel:
  """A model with these weights."""
  return nnx.merge(structure(config), params)


@functools.partial(jax.jit, static_argnames=("config", "seed"))
def initial_params(config: ModelConfig, seed: int) -> nnx.State:
  """The weights before the first step."""
  return nnx.state(make(config, seed))
