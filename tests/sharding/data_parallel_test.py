"""Rows spread over eight devices: the same numbers, and no hidden gathers."""

import dataclasses
import functools

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
  KeepMostUsed,
  Logarithmic,
)
from memcache_jax.layers import MemoryAsContext, MemoryMixer
from memcache_jax.memories import (
  DecayedLinear,
  HeadShape,
  SlidingWindowLinear,
  Titans,
)
from memcache_jax.testing import assert_close, random_tokens

# Heads wide enough for the kernels, which a CPU does not take.
BATCH, LENGTH, DIM, HEADS = 8, 40, 64, 2
AXIS_TYPES = {
  "auto": jax.sharding.AxisType.Auto,
  "explicit": jax.sharding.AxisType.Explicit,
}


def _mixer(memory):
  return MemoryMixer(DIM, HEADS, memory, rngs=nnx.Rngs(0))


def _step(mixer):
  graphdef, params, rest = nnx.split(mixer, nnx.Param, ...)

  def loss(params, x):
    y, _ = nnx.merge(graphdef, params, rest)(x)
    return jnp.mean(jnp.square(y)), y

  return jax.jit(jax.value_and_grad(loss, has_aux=True)), params


@pytest.mark.parametrize("policy", [DropOldest(2), KeepMostUsed(2)])
def test_policies_over_eight_devices(policy):
  memory = Cached(DecayedLinear(), Constant(2), GatedResidual(), policy=policy)
  shape = HeadShape(2, 4, 4)
  params = memory.init_params(jax.random.key(0), shape)
  tokens = random_tokens(
    memory, shape, BATCH, 12, mask_probability=0.2, start_probability=0.1
  )
  tokens = dataclasses.replace(tokens, max_unaligned_starts=4)
  run = jax.jit(lambda tokens: memory.scan(params, None, tokens))
  expected = run(tokens)
  explicit = (jax.sharding.AxisType.Explicit,)
  mesh = jax.make_mesh((8,), ("data",), axis_types=explicit)
  with jax.set_mesh(mesh):
    rows = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data")))
    got = run(rows)
  assert_close(jax.device_get(got), jax.device_get(expected))


def _inputs(length):
  x = np.random.default_rng(0).standard_normal((BATCH, length, DIM))
  return x.astype(np.float32)


def _in_two_calls(layer, x):
  """In the second one some tokens are masked and some start a document."""
  first, state = layer(x[:, :9], layer.init_state(BATCH, 64))
  x = x[:, 9:]
  second, state = layer(
    x,
    state,
    mask=x[..., 0] < 1,
    starts=x[..., 1] > 0,
    max_unaligned_starts=x.shape[1],
  )
  return jnp.concatenate([first, second], axis=1), state


def test_states_over_eight_devices():
  run, x = jax.jit(_in_two_calls), _inputs(12)
  layer = _mixer(Cached(DecayedLinear(), Logarithmic(4)))
  expected = run(layer, x)
  explicit = (jax.sharding.AxisType.Explicit,)
  mesh = jax.make_mesh((8,), ("data",), axis_types=explicit)
  with jax.set_mesh(mesh):
    rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    everywhere = jax.NamedSharding(mesh, jax.P())
    got = run(jax.device_put(layer, everywhere), rows)
  assert_close(jax.device_get(got), jax.device_get(expected))


def test_context_over_rows_and_heads():
  layer = MemoryAsContext(
    DIM, HEADS, DecayedLinear(), segment_length=4, rngs=nnx.Rngs(0)
  )
  graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
  def step(params, x):
    y, state = _in_two_calls(nnx.merge(graphdef, params, rest), x)
    return jnp.mean(jnp.sin(y)), (y, state)

  x = _inputs(12)
  expected = step(params, x)
  explicit = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=explicit)

  def place(x):
    spec = ("tensor" if size == HEADS else None for size in x.shape)
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

  with jax.set_mesh(mesh):
    rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    got = step(jax.tree.map(place, params), rows)
  state = got[0][1][1]
  assert state.keys.sharding.spec == jax.P("data", None, "tensor", None)
  assert_close(jax.device_get(got), jax.device_get(expected), 1e-5)


@functools.cache
def _on_one_device(memory):
  step, params = _step(_mixer(memory))
  x = _inputs(LENGTH)
  return step, params, x, step(params, x)


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize(
  "memory",
  [
    DecayedLinear(),
    Cached(DecayedLinear(), Constant(16), GatedResidual()),
    Cached(SlidingWindowLinear(), Constant(16), write_mode="checkpoint"),
    Cached(Titans(), Constant(16), GatedResidual()),
  ],
  ids=("plain", "independent", "checkpoint", "networks"),
)
def test_batch_over_eight_devices(memory, axis_type):
  assert jax.device_count() == 8
  step, params, x, expected = _on_one_device(memory)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AXIS_TYPES[axis_type],))
  with jax.set_mesh(mesh):
    rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    everywhere = jax.NamedSharding(mesh, jax.P())
    params = jax.tree.map(lambda p: jax.device_put(p, everywhere), params)
    compiled = step.lower(params, rows).compile()
    got, text = compiled(params, rows), compiled.as_text()
  assert got[0][1].sharding.spec[0] == "data"
  assert_close(jax.device_get(got), jax.device_get(expected))
  assert "all-gather" not in text
  assert "all-to-all" not in text
