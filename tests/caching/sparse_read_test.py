"""Reading selected memories only, against reading all with zeros."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.caching import (
  Cached,
  Constant,
  SparseSelective,
  _sparse_read,
  _weights,
)
from memcache_jax.caching._aggregators import Selection
from memcache_jax.memories import DecayedLinear, HeadShape, Linear, Titans
from memcache_jax.testing import assert_close, random_tokens, stream
from tests.memories.models import FLAT, Saturating

SHAPE = HeadShape(2, 4, 3)
SLOTS = 5


def _inputs(memory, tokens, top_k):
  """Memories of several rows, and distinct choices of each token and head."""
  params = memory.init_params(jax.random.key(0), SHAPE)
  state = memory.init_state(params, SHAPE, 2 * SLOTS)
  written = random_tokens(memory, SHAPE, 2 * SLOTS, 3)
  written = replace(written, mask=None, starts=None)
  state = memory.scan(params, state, written)[1]
  memories = jax.tree.map(
    lambda x: x.reshape(2, SLOTS, *x.shape[1:]), memory.snapshot(state)
  )
  rng = np.random.default_rng(0)
  index = rng.random((2, tokens, 2, SLOTS - 1)).argsort(-1)[..., :top_k]
  index[rng.random(index.shape) < 0.2] = -1  # and the last one never
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  q = normal(2, tokens, 2, 4)
  weights = normal(2, tokens, 2, top_k)
  return params, memories, q, jnp.asarray(index, jnp.int32), weights


def _sparse(memory, params, memories, q, index, weights):
  selection = Selection(index, weights, jnp.ones(q.shape[:-1]))
  return _sparse_read.read_selected(memory, params, memories, q, selection)


def _dense(memory, params, memories, q, index, weights):
  hot = index[..., None] == jnp.arange(SLOTS).reshape(1, 1, 1, 1, -1)
  all_weights = jnp.sum(jnp.where(hot, weights[..., None], 0.0), axis=3)
  return memory.read_many(params, memories, q, all_weights)


@pytest.mark.parametrize(
  ("memory", "tokens", "top_k"),
  [
    (Linear(), 1, 2),
    (Linear(), 40, 1),
    (Linear(), 40, 3),
    (Saturating(), 13, 2),
    (Titans(FLAT, inner_batch=4), 13, 2),
  ],
)
def test_values_and_gradients_of_reading_all(memory, tokens, top_k):
  params, *arrays, index, weights = _inputs(memory, tokens, top_k)
  out_weights = np.random.default_rng(1).standard_normal((2, tokens, 2, 3))
  out_weights = jnp.asarray(out_weights, jnp.float32)

  def loss(read, memories, q, weights, index):
    # Computed anew, as in a model, where choices are traced.
    call = jax.checkpoint(functools.partial(read, memory, params))
    y = call(memories, q, index, weights)
    return jnp.sum(y * out_weights), y

  gradient = jax.jit(
    jax.grad(loss, argnums=(1, 2, 3), has_aux=True), static_argnums=0
  )
  got = gradient(_sparse, *arrays, weights, index)
  assert_close(got, gradient(_dense, *arrays, weights, index))
  assert np.any(got[1] != 0)


@pytest.mark.parametrize("tokens", [1, 13])
def test_what_nobody_selected_may_be_nan(tokens):
  memory = Linear()
  params, memories, q, index, weights = _inputs(memory, tokens, 2)
  read = jax.jit(
    lambda memories: _sparse(memory, params, memories, q, index, weights)
  )
  poisoned = memories.at[:, -1].set(jnp.nan)
  chex.assert_trees_all_equal(read(poisoned), read(memories))


def test_a_cache_of_many_segments(monkeypatch):
  """One call, token by token, and reading all, with masks and documents."""
  memory = Cached(DecayedLinear(), Constant(1), SparseSelective(2))
  tokens = random_tokens(
    memory, SHAPE, 2, 34, mask_probability=0.1, start_probability=0.03
  )
  tokens = replace(tokens, max_unaligned_starts=34)
  empty = memory.init_state({}, SHAPE, 2, max_length=34)

  def make():
    def loss(q, k):
      y, state = memory.scan({}, empty, replace(tokens, q=q, k=k))
      return jnp.sum(jnp.sin(y)), (y, state)

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

  calls = []
  read_selected = _sparse_read.read_selected

  def counted(*args):
    calls.append(args)
    return read_selected(*args)

  monkeypatch.setattr(_sparse_read, "read_selected", counted)
  sparse = make()(tokens.q, tokens.k)
  assert len(calls) == 1
  step = jax.jit(lambda state, tokens: memory.scan({}, state, tokens))
  assert_close(stream(step, empty, tokens, [1]), sparse[1])
  monkeypatch.setattr(_weights, "_SLOTS_PER_SELECTED", 1000)
  assert_close(make()(tokens.q, tokens.k), sparse)
  assert len(calls) == 1


def test_second_derivatives(monkeypatch):
  memory = Cached(Linear(implementation="xla"), Constant(1), SparseSelective(2))
  tokens = random_tokens(memory, SHAPE, 1, 26)
  tokens = replace(tokens, mask=None, starts=None)

  def run():
    def loss(q, k, u):
      now = replace(tokens, q=q, k=k, gates={"u": u})
      return jnp.sum(jnp.sin(memory.scan({}, None, now)[0]))

    def of_gradient(*inputs):
      found = jax.grad(loss, argnums=(0, 1, 2))(*inputs)
      return sum(jnp.sum(jnp.sin(x)) for x in found)

    gradient = jax.jit(jax.grad(of_gradient, argnums=(0, 1, 2)))
    return gradient(tokens.q, tokens.k, tokens.gates["u"])

  sparse = run()
  monkeypatch.setattr(_weights, "_SLOTS_PER_SELECTED", 1000)
  assert_close(run(), sparse)
