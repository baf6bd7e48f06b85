"""Titans' ways to join attention and memory, against their equations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import Cached, Constant
from memcache_jax.layers import MemoryAsContext, MemoryAsGate
from memcache_jax.layers._base import to_front
from memcache_jax.memories import Linear
from memcache_jax.models import (
  LanguageModel,
  MemoryAsContextSpec,
  MemoryAsGateSpec,
  ModelConfig,
  memory_reports,
  segment_gates,
)
from tests.layers.cases import (
  DIM,
  MAMBA2,
  SEGMENT,
  fast_to_compile,
  hybrid,
  louder,
  run,
)

LENGTH = 10  # two segments and a half


def inputs(length=LENGTH):
  return jax.random.normal(jax.random.key(0), (2, length, DIM))


def gated(layer, y, m):
  """``norm(y) * sigmoid(norm(m))``"""

  def norm(x, module):
    x = np.float64(x)
    rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return x / rms * np.float64(module.scale[...])

  y, m = norm(y, layer.gate.norm), norm(m, layer.gate.gate_norm)
  return y / (1 + np.exp(-m))


def test_gate_is_the_product_of_its_branches():
  """So that what holds for any mixer holds for it: it is only the two."""
  layer = louder(hybrid(MemoryAsGate, MAMBA2, window=5, out_scale=0.5))
  x, rng = inputs(), np.random.default_rng(0)
  flags = {
    "mask": jnp.asarray(rng.random((2, LENGTH)) < 0.8),
    "starts": jnp.asarray(rng.random((2, LENGTH)) < 0.2),
  }
  state = layer.init_state(2, LENGTH)
  y, of_attention = run(layer.attention, x, state.attention, **flags)
  m, of_memory = run(layer.memory_mixer, x, state.memory, **flags)
  expected = gated(layer, y, m)
  got, state = run(layer, x, state, **flags)
  np.testing.assert_allclose(got, expected, atol=1e-5)
  chex.assert_trees_all_close(
    tuple(state), (of_attention, of_memory), atol=1e-6
  )
  assert 0.1 < np.std(expected) < 0.5  # out_scale, and gates about a half


def attend(layer, x, h):
  """Every token of a segment: softmax over persistent, recalled and real."""
  attention = layer.attention
  position = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2])
  q, plain, *_ = attention.queries(
    attention.q(x), position, jnp.zeros_like(position)
  )
  (persistent,) = attention.persistent_keys()
  k = [attention.keys(attention.k(z), position) for z in (x, h)]
  v = [attention.v(x), attention.v(h)]
  rows = []
  for i in range(x.shape[1]):
    logits = [jnp.einsum("bnk,mnk->bnm", plain[:, i], persistent.k)]
    logits += [jnp.einsum("bnk,bmnk->bnm", q[:, i], a[:, : i + 1]) for a in k]
    weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1)
    values = [jnp.stack([persistent.v] * 2), *(a[:, : i + 1] for a in v)]
    values = jnp.concatenate(values, axis=1)
    rows.append(jnp.einsum("bnm,bmnk->bnk", weights, values))
  return attention.out(jnp.stack(rows, axis=1))


def test_context_is_segment_by_segment():
  layer = louder(hybrid(MemoryAsContext, MAMBA2, segment_length=SEGMENT))
  x = inputs()

  @fast_to_compile
  def literal(layer, x):
    mixer = layer.memory_mixer
    q, _ = mixer.queries(to_front(x, None, None), None)
    state, ys, ms, hs = mixer.init_state(2, LENGTH), [], [], []
    for begin in range(0, LENGTH, SEGMENT):
      piece = slice(begin, begin + SEGMENT)
      before = mixer.memory.snapshot(state.memory)
      hs.append(mixer.recall(x[:, piece], q[:, piece], before))
      ys.append(attend(layer, x[:, piece], hs[-1]))
      m, state = mixer(ys[-1], state)
      ms.append(m)
    return [jnp.concatenate(parts, axis=1) for parts in (ys, ms, hs)]

  y, m, h = literal(layer, x)
  expected = gated(layer, y, m)
  np.testing.assert_allclose(run(layer, x)[0], expected, atol=1e-5)
  # What is recalled changes from segment to segment: it is read at all.
  same = np.asarray(run(layer, jnp.stack([x[:, 0]] * LENGTH, axis=1))[0])
  assert np.any(np.abs(same[:, 3] - same[:, 7]) > 1e-3)
  assert np.any(np.abs(h) > 1e-3)


@pytest.mark.slow
def test_what_looks_into_memories_finds_them():
  cached = Cached(Linear(), Constant(SEGMENT))
  config = ModelConfig.tiny(
    MemoryAsGateSpec(cached, 2, window=5),
    MemoryAsContextSpec(Linear(), 2, segment_length=SEGMENT),
  )
  model = LanguageModel(config, rngs=nnx.Rngs(0))
  tokens = jnp.arange(2 * LENGTH).reshape(2, LENGTH)
  gates = fast_to_compile(segment_gates)(model, tokens)
  assert {layer: x.shape for layer, x in gates.items()} == {0: (2, 10, 2, 3)}
  np.testing.assert_allclose(np.sum(gates[0], axis=-1), 1, atol=1e-5)
  reports = fast_to_compile(memory_reports)(model, tokens)
  assert sorted(reports) == [0, 1]
  assert all(report.state_norm > 0 for report in reports.values())


def test_errors(as_a_user):
  with pytest.raises(ValueError, match="`memory` must not be cached"):
    hybrid(MemoryAsContext, Cached(Linear()), segment_length=SEGMENT)
  with pytest.raises(ValueError, match="`segment_length` .* got 0"):
    hybrid(MemoryAsContext, segment_length=0)
  with pytest.raises(ValueError, match="`window` .* got 0"):
    hybrid(MemoryAsGate, window=0)
  for kind in (MemoryAsContext, MemoryAsGate):
    with pytest.raises(ValueError, match="`persistent_tokens` .* got -1"):
      hybrid(kind, persistent_tokens=-1)
    layer = hybrid(kind)
    with pytest.raises(ValueError, match="`segment_ends` must be None"):
      layer(inputs(), segment_ends=jnp.ones((2, LENGTH), bool))
