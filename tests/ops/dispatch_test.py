"""What runs where nobody chooses: on this machine, the same as in XLA.

Sizes are those that kernels take, so that one is in the program, for another
platform. The kernels themselves are tested with their ops.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.caching import (
  Cached,
  Constant,
  GatedResidual,
  SparseSelective,
)
from memcache_jax.memories import DecayedLinear, GatedDelta, HeadShape, Miras
from memcache_jax.ops import cache_read
from memcache_jax.ops.mlp_memory import MLP, AffineShape, Architecture
from memcache_jax.testing import assert_close, random_tokens

WIDTH = 32
SHAPE = HeadShape(2, WIDTH, WIDTH)


def _normal(seed, *shape):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _gradients(function, *arrays):
  def loss(*arrays):
    y = function(*arrays)
    return jnp.sum(jnp.sin(y)), y

  argnums = tuple(range(len(arrays)))
  return jax.jit(jax.grad(loss, argnums, has_aux=True))(*arrays)


def test_reads_of_matrices():
  arrays = (
    _normal(0, 2, 9, 2, WIDTH),
    _normal(1, 2, 5, 2, WIDTH, WIDTH),
    _normal(2, 2, 9, 2, 5),
  )
  run = lambda name: _gradients(
    lambda *arrays: cache_read(*arrays, implementation=name), *arrays
  )
  assert_close(run(None), run("reference"))


@dataclass(frozen=True)
class Own(Architecture):
  """What no kernel could take: it names its axes and has constants."""

  def affine_maps(self, key_dim, value_dim):
    return {"w": AffineShape(key_dim, value_dim)}

  def forward(self, affine, static, x):
    z = affine("w", jnp.einsum("bntk,bntk->bntk", x, jnp.tanh(x)))
    return z * np.linspace(0.5, 1.5, z.shape[-1], dtype=np.float32).reshape(
      1, 1, 1, -1
    )


def _cached(memory, aggregate, segment):
  return Cached(memory, Constant(segment), aggregate)


CACHED = {
  # 26 memories of which two are read: pairs are sorted.
  "selected_learned": lambda name: _cached(
    GatedDelta(initial="learned", implementation=name), SparseSelective(2), 4
  ),
  "networks": lambda name: _cached(
    Miras(MLP(hidden_factor=1), implementation=name), GatedResidual(), 32
  ),
  "own_networks": lambda name: _cached(
    Miras(Own(), implementation=name), GatedResidual(), 32
  ),
}


@pytest.mark.parametrize("name", CACHED)
def test_cached_memories(name):
  memory = CACHED[name](None)
  params = memory.init_params(jax.random.key(0), SHAPE)
  tokens = random_tokens(memory, SHAPE, 1, 107)
  tokens = replace(tokens, mask=None, starts=None, segment_ends=None)

  def run(implementation):
    memory = CACHED[name](implementation)
    return _gradients(
      lambda params, tokens: memory.scan(params, None, tokens)[0],
      *(params, tokens),
    )

  assert_close(run(None), run("xla"), 1e-4)


@pytest.mark.parametrize("kind", [DecayedLinear, GatedDelta, Miras])
def test_a_name_that_does_not_exist_is_refused_at_once(kind, as_a_user):
  with pytest.raises(ValueError, match="`implementation` must be .* got 'foo'"):
    kind(implementation="foo")


@pytest.mark.parametrize("kind", [DecayedLinear, GatedDelta, Miras])
@pytest.mark.parametrize("implementation", ["triton", "mosaic_tpu"])
def test_a_chosen_kernel_is_for_the_ops_that_have_it(implementation, kind):
  """A stream begins with tokens that no kernel is for."""
  memory = kind(implementation=implementation)
  params = memory.init_params(jax.random.key(0), SHAPE)
  tokens = random_tokens(memory, SHAPE, 1, 1)
  y, _ = jax.eval_shape(memory.scan, params, None, tokens)
  assert y.shape == (1, 1, 2, WIDTH)
