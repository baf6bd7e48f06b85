"""A decode step updates a donated cache where it lies, without a copy."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from memcache_jax.caching import (
  Cached,
  Constant,
  GatedResidual,
  MemorySoup,
  SparseSelective,
)
from memcache_jax.layers import MemoryMixer
from memcache_jax.memories import DecayedLinear, DeepLinear
from memcache_jax.ops.mlp_memory import MLP

SLOTS, SEGMENT, DIM = 64, 4, 32

NETWORK = DeepLinear(MLP(hidden_factor=1))
slow = pytest.mark.slow


@pytest.mark.parametrize(
  ("memory", "aggregate", "batch"),
  [
    (DecayedLinear(), GatedResidual(), 2),
    (DecayedLinear(), SparseSelective(), 1),
    pytest.param(NETWORK, GatedResidual(), 1, marks=slow),
    pytest.param(NETWORK, MemorySoup(), 2, marks=slow),
    pytest.param(NETWORK, SparseSelective(), 1, marks=slow),
  ],
  ids=lambda x: type(x).__name__,
)
def test_no_copy_of_the_cache(memory, aggregate, batch):
  cached = Cached(memory, Constant(SEGMENT), aggregate)
  layer = MemoryMixer(DIM, 2, cached, rngs=nnx.Rngs(0))
  state = layer.init_state(batch, SLOTS * SEGMENT)
  step = jax.jit(lambda layer, x, state: layer(x, state), donate_argnums=2)
  compiled = step.lower(layer, jnp.ones((batch, 1, DIM)), state).compile()
  memories = jax.tree.leaves(state.memory.memories)
  room = compiled.memory_analysis().temp_size_in_bytes
  assert room < min(x.nbytes for x in memories)
  # An array that cannot be donated twice, or not at all, would be copied.
  _, state = compiled(layer, jnp.ones((batch, 1, DIM)), state)
  assert all(x.is_deleted() for x in memories)
