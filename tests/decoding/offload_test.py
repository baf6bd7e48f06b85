"""A cache in the memory of the host gives what a resident one does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import (
  Cached,
  Constant,
  DropOldest,
  Logarithmic,
  SparseSelective,
)
from memcache_jax.decoding import (
  _offload,
  decode_step,
  mark,
  prefill,
  rewind,
  to_device,
  to_host,
  with_room,
)
from memcache_jax.memories import DecayedLinear, DeepLinear
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  ModelConfig,
)
from memcache_jax.ops.mlp_memory import MLP
from tests.layers.cases import fast_to_compile, louder

VOCAB, SEGMENT, SLOTS = 13, 4, 20
TEXT = np.random.default_rng(0).integers(0, VOCAB, (2, 30), np.int32)
SELECTS = SparseSelective(top_k=1)


def _model(memory):
  config = ModelConfig(
    vocab_size=VOCAB,
    dim=8,
    num_layers=2,
    pattern=(MemorySpec(memory, 2), AttentionSpec(2, window=3)),
    hidden_dim=12,
  )
  return louder(LanguageModel(config, rngs=nnx.Rngs(0)))


def _kinds(state):
  return {x.sharding.memory_kind for x in jax.tree.leaves(state)}


@pytest.mark.slow
@pytest.mark.parametrize(
  "memory",
  [DecayedLinear.mamba2(), DeepLinear(MLP(hidden_factor=1))],
  ids=["linear", "network"],
)
def test_steps_are_equal_to_the_bit(memory):
  model = _model(Cached(memory, Constant(SEGMENT), SELECTS))
  state = model.init_state(2, SLOTS * SEGMENT)
  _, state = fast_to_compile(prefill)(model, TEXT[:, :20], state)
  # Copied, as both are donated, and share what is not moved.
  host = to_host(model, jax.tree.map(jnp.copy, state))
  # All but what was selected stays where it is.
  program = str(jax.make_jaxpr(decode_step)(model, TEXT[:, 0], host))
  for leaf in jax.tree.leaves(state[0].memory.memories):
    shape = ",".join(map(str, leaf.shape))
    assert f"f32<host>[{shape}]" in program
    assert f"f32[{shape}]" not in program
  step = jax.jit(decode_step, donate_argnames="state")
  for token in TEXT[:, 20:].T:
    logits, state = step(model, token, state)
    got, host = step(model, token, host)
    chex.assert_trees_all_equal(got, logits)
  assert state[0].memory.count.tolist() == [7, 7]
  assert _kinds(host[0].memory.memories) == {"pinned_host"}
  assert _kinds(host[0]._replace(memory=host[0].memory.online)) == {"device"}
  chex.assert_trees_all_equal(to_device(host), state)
  assert _kinds(to_device(host)) == {"device"}


@pytest.mark.usefixtures("as_a_user")
def test_errors(monkeypatch):
  model = _model(Cached(DecayedLinear(), Constant(SEGMENT), SELECTS))
  state = model.init_state(1, SLOTS * SEGMENT)
  with pytest.raises(ValueError, match="must be on the device to read several"):
    prefill(model, jnp.zeros((1, 2), jnp.int32), to_host(model, state))
  with pytest.raises(ValueError, match="`state` must be a whole state"):
    to_host(model, ())
  with pytest.raises(ValueError, match="on the device to be rewound: got"):
    rewind(to_host(model, state), mark(model, state))
  with pytest.raises(ValueError, match="on the device to get more room: got"):
    with_room(model, to_host(model, state), 2 * SLOTS * SEGMENT)
  monkeypatch.setattr(_offload, "_KIND", "elsewhere")
  with pytest.raises(ValueError, match="of the kind 'elsewhere': got .*device"):
    to_host(model, state)
  for cached in (
    Cached(DecayedLinear(), Constant(SEGMENT)),
    Cached(DecayedLinear(), Logarithmic(SEGMENT), SELECTS),
    Cached(DecayedLinear(), Constant(4), SELECTS, policy=DropOldest(20)),
  ):
    with pytest.raises(ValueError, match="`model` must have caches that keep"):
      to_host(_model(cached), state)
