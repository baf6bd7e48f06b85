"""Segments of one sequence over devices: equal, and no token leaves its own."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import (
  Cached,
  Constant,
  DropOldest,
  GatedResidual,
  Logarithmic,
  MemorySoup,
  SparseSelective,
)
from memcache_jax.layers import Attention, MemoryMixer
from memcache_jax.memories import (
  DecayedLinear,
  SlidingWindowLinear,
  Titans,
)
from memcache_jax.testing import assert_close

B, T, D, HEADS, LENGTH = 2, 96, 32, 2, 8
ROWS = jax.P("fsdp", "sequence")


def _mesh():
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  return jax.make_mesh((2, 4), ("fsdp", "sequence"), axis_types=kinds)


def _inputs():
  rng = np.random.default_rng(0)
  starts = np.zeros((B, T), bool)
  starts[0, [24, 72]] = starts[1, 8] = True
  return rng.standard_normal((B, T, D)).astype(np.float32), starts


def _step(layer):
  graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

  def loss(params, x, starts):
    layer = nnx.merge(graphdef, params, rest)
    y, state = layer(x, starts=starts, max_unaligned_starts=0)
    return jnp.mean(jnp.sin(y)), (y, state)

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)), params


@pytest.mark.parametrize(
  ("memory", "aggregate"),
  [
    (SlidingWindowLinear(), GatedResidual()),
    (DecayedLinear(), SparseSelective(top_k=2)),
    (Titans(inner_batch=4), MemorySoup()),
  ],
  ids=("linear", "sparse", "networks"),
)
def test_equals_one_device_and_moves_no_tokens(memory, aggregate):
  cached = Cached(memory, Constant(LENGTH), aggregate)
  step, params = _step(MemoryMixer(D, HEADS, cached, rngs=nnx.Rngs(0)))
  x, starts = _inputs()
  expected = step(params, x, starts)
  with jax.set_mesh(mesh := _mesh()):
    place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, ROWS))
    args = params, place(x), place(starts)
    compiled = step.lower(*args).compile()
    got = compiled(*args)
  assert got[0][1][0].sharding.spec[:2] == ("fsdp", "sequence")
  assert_close(jax.device_get(got), jax.device_get(expected), 1e-5)
  text = compiled.as_text()
  gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text)
  # End states are; a row's tokens, or segments of tokens, are not.
  sizes = [math.prod(map(int, shape.split(","))) for shape in gathered]
  assert max(sizes) >= T // LENGTH * D * (D // HEADS)
  whole = re.compile(rf"(^|,)({T}|{T // LENGTH},{LENGTH})(,|$)")
  assert not list(filter(whole.search, gathered))
  assert "all-to-all" not in text


@pytest.mark.parametrize(
  ("layer", "message"),
  [
    (lambda rngs: Attention(D, HEADS, rngs=rngs), "rows .b. and heads"),
    (lambda rngs: _mixer(DecayedLinear(), rngs), "rows .b. and heads"),
    (
      lambda rngs: _mixer(Cached(DecayedLinear(), Logarithmic(8)), rngs),
      "Cons",
    ),
    (
      lambda rngs: _mixer(
        Cached(DecayedLinear(), Constant(8), write_mode="checkpoint"), rngs
      ),
      "independent",
    ),
    (
      lambda rngs: _mixer(
        Cached(DecayedLinear(), Constant(8), policy=DropOldest(2)), rngs
      ),
      "policy",
    ),
    (
      lambda rngs: _mixer(Cached(DecayedLinear(), Constant(32)), rngs),
      "4 devices must hold whole segments of 32: got 96 in all",
    ),
  ],
)
def test_what_is_refused(layer, message):
  step, params = _step(layer(nnx.Rngs(0)))
  x, starts = _inputs()
  with jax.set_mesh(mesh := _mesh()):
    place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, ROWS))
    with pytest.raises(ValueError, match=message):
      step.trace(params, place(x), place(starts))


def _mixer(memory, rngs):
  return MemoryMixer(D, HEADS, memory, rngs=rngs)
