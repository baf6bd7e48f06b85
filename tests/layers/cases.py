"""Mixers that share one contract, and how tests call them."""

import functools

import jax
import numpy as np
from flax import nnx

from memcache_jax.caching import Cached, Constant
from memcache_jax.layers import (
  Attention,
  MemoryAsContext,
  MemoryMixer,
  NoDecayParam,
)
from memcache_jax.memories import DecayedLinear, SlidingWindowLinear

DIM = 8
SEGMENT = 4
MAMBA2 = DecayedLinear.mamba2()


def memory_mixer(memory, **options):
  options = {"key_dim": 4, "value_dim": 3, "rngs": nnx.Rngs(0), **options}
  return MemoryMixer(DIM, 2, memory, **options)


def attention(**options):
  return Attention(DIM, 2, **{"rngs": nnx.Rngs(0), "chunk_size": 6, **options})


def hybrid(kind, memory=MAMBA2, **options):
  options = {"persistent_tokens": 2, "rngs": nnx.Rngs(0), **options}
  return kind(DIM, 2, memory, **options)


# Every mixer is one line here.
MIXERS = {
  "decayed": lambda **options: memory_mixer(MAMBA2, **options),
  "cached": lambda **options: memory_mixer(
    Cached(SlidingWindowLinear(), Constant(SEGMENT)), **options
  ),
  "attention": attention,
  "window": lambda **options: attention(
    window=5, persistent_tokens=2, **options
  ),
  "context": lambda **options: hybrid(
    MemoryAsContext, segment_length=SEGMENT, **options
  ),
}


def make(name, **options):
  return louder(MIXERS[name](**options))


def louder(module, factor=10.0):
  """Larger weights, so that every part of a module shows in its output."""

  def is_weight(path, variable):
    del path
    return isinstance(variable, nnx.Param) and not isinstance(
      variable, NoDecayParam
    )

  graphdef, weights, rest = nnx.split(module, is_weight, ...)
  weights = jax.tree.map(lambda x: x * factor, weights)
  return nnx.merge(graphdef, weights, rest)


# Compiling is what these tests wait for; tiny layers need no fast code.
fast_to_compile = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@fast_to_compile
def run(layer, x, state=None, mask=None, starts=None):
  """One compiled call for all layers of the same structure and shapes."""
  # As many starts as there are tokens: nothing is assumed about them.
  return layer(
    x,
    state,
    mask=mask,
    starts=starts,
    max_unaligned_starts=None if starts is None else x.shape[1],
  )


def run_pieces(layer, x, state, lengths, **flags):
  """The same in several calls."""
  # On the host no piece has to be compiled to be cut out.
  x, flags = jax.device_get((x, flags))
  ys, begin = [], 0
  for length in lengths:
    piece = slice(begin, begin + length)
    y, state = run(
      layer,
      x[:, piece],
      state,
      **{name: flag[:, piece] for name, flag in flags.items()},
    )
    ys.append(y)
    begin += length
  assert begin == x.shape[1]
  return np.concatenate(ys, axis=1), state


def lengths_of_pieces(total):
  """Calls of 9 and 1 tokens, the only lengths the tests compile."""
  return [9] * (total // 9) + [1] * (total % 9)


def memory_of(layer):
  """The memory as a list of arguments, empty for attention."""
  return [layer.memory] if hasattr(layer, "memory") else []
