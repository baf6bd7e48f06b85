"""The shortest proof that an installation works: import all, run a little."""

import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax import caching, layers, memories
from tests.imports_test import MODULES


@pytest.mark.parametrize("module", MODULES)
def test_module_imports(module: str):
  assert importlib.import_module(module).__doc__


def test_a_cached_mixer_streams_what_it_computes_at_once():
  batch, tokens, dim = 2, 11, 16
  memory = caching.Cached(
    memories.Linear(),
    segments=caching.Constant(4),
    aggregate=caching.GatedResidual(),
  )
  mixer = layers.MemoryMixer(dim, 2, memory, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(1), (batch, tokens, dim))

  run = jax.jit(lambda mixer, x, state: mixer(x, state))
  whole, _ = run(mixer, x, None)
  chex.assert_shape(whole, (batch, tokens, dim))
  chex.assert_tree_all_finite(whole)
  assert float(jnp.std(whole)) > 0

  state = mixer.init_state(batch, tokens)
  parts = []
  for t in range(tokens):
    y, state = run(mixer, x[:, t : t + 1], state)
    parts.append(y)
  streamed = jnp.concatenate(parts, axis=1)
  np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-5)
