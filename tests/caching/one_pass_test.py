"""Segments written and read by one kernel: the same function."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.caching import Cached, Constant, SparseSelective
from memcache_jax.memories import DecayedLinear, HeadShape
from memcache_jax.testing import assert_close, random_tokens, take

# Kernels are simulated.
pytestmark = pytest.mark.slow

SHAPE, LENGTH, FIRST = HeadShape(2, 32, 32), 60, 37


def _cached(write_mode, implementation):
  memory = DecayedLinear(
    decay="fixed", write="sigmoid", implementation=implementation
  )
  return Cached(memory, Constant(16), SparseSelective(2), write_mode)


def _two_calls(cached):
  """The second call goes on with what the first one left."""
  tokens = random_tokens(
    cached, SHAPE, 1, LENGTH, mask_probability=0.2, start_probability=0.05
  )

  def run(tokens):
    state = cached.init_state({}, SHAPE, 1, max_length=LENGTH)
    first, state = cached.scan({}, state, take(tokens, 0, FIRST))
    second, state = cached.scan({}, state, take(tokens, FIRST, LENGTH))
    return jnp.concatenate([first, second], axis=1), state

  return run, tokens


@functools.cache
def _apart(write_mode):
  run, tokens = _two_calls(_cached(write_mode, "xla"))
  return jax.jit(run)(tokens)


def test_equals_writing_and_reading_apart():
  run, tokens = _two_calls(_cached("checkpoint", None))
  assert_close(jax.jit(run)(tokens), _apart("checkpoint"))


def test_the_kernel_equals_writing_and_reading_apart():
  run, tokens = _two_calls(_cached("checkpoint", "mosaic_tpu"))
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ):
    got = jax.block_until_ready(jax.jit(run)(tokens))
  assert_close(got, _apart("checkpoint"))


@pytest.mark.parametrize(
  ("segments", "kernels"), [(Constant(16), 1), (Constant(20), 0)]
)
def test_none_takes_the_kernel_on_a_tpu(segments, kernels):
  cached = Cached(DecayedLinear(), segments)
  tokens = random_tokens(cached, SHAPE, 1, LENGTH)
  scan = jax.jit(lambda tokens: cached.scan({}, None, tokens)[0])
  text = scan.trace(tokens).lower(lowering_platforms=("tpu",)).as_text()
  assert text.count("memcache_cached_linear_attention_fwd") == kernels
