"""Deep memories in training: no nan, learning along the text, or a sign."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memcache_jax.memories import Titans, default_step_scale
from memcache_jax.models import (
  LanguageModel,
  MemorySpec,
  ModelConfig,
  memory_reports,
  next_token_loss,
)
from memcache_jax.ops.mlp_memory import MLP

pytestmark = pytest.mark.slow

STEPS, ROWS, LENGTH = 300, 2, 64


def _model(memory):
  config = ModelConfig(
    vocab_size=256,
    dim=8,
    num_layers=1,
    pattern=(MemorySpec(memory, 1),),
    hidden_dim=8,
  )
  return LanguageModel(config, rngs=nnx.Rngs(0))


def test_a_memory_of_four_layers_trains_on_noise():
  graphdef, params, rest = nnx.split(
    _model(Titans(MLP(depth=4))), nnx.Param, ...
  )
  optimizer = optax.adamw(1e-2)
  rng = np.random.default_rng(0)
  texts = rng.integers(0, 256, (STEPS, ROWS, LENGTH + 1), np.int32)

  def step(carry, text):
    params, moments = carry

    def loss(params):
      model = nnx.merge(graphdef, params, rest)
      return next_token_loss(model(text[:, :-1])[0], text[:, 1:])

    value, grads = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value

  @jax.jit
  def train(params, texts):
    carry, losses = jax.lax.scan(step, (params, optimizer.init(params)), texts)
    return carry[0], losses

  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    params, losses = train(params, jnp.asarray(texts))
  assert np.all(np.isfinite(losses))
  assert np.mean(losses[-30:]) < losses[0]
  model = nnx.merge(graphdef, params, rest)
  (block,) = model.unstacked_blocks()
  x = block.mixer_norm(model.embedding(jnp.asarray(texts[:8, 0, :-1])))
  inner = jax.jit(lambda mixer, x: mixer.watch(x))(block.mixer, x).inner_loss
  tenth = LENGTH // 10
  assert np.mean(inner[:, -tenth:]) <= np.mean(inner[:, :tenth])


def test_gradients_of_fresh_networks_do_not_grow_with_the_text():
  config = ModelConfig(64, 32, 1, (MemorySpec(Titans(), 2),), hidden_dim=32)
  model = LanguageModel(config, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(model)
  texts = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 1025)))

  @jax.jit
  def norm(params):
    def loss(params):
      logits, _ = nnx.merge(graphdef, params)(texts[:, :-1])
      return next_token_loss(logits, texts[:, 1:])

    squares = jax.tree.map(lambda x: jnp.sum(x**2), jax.grad(loss)(params))
    return jnp.sqrt(sum(jax.tree.leaves(squares)))

  assert norm(params) < 10


def test_steps_far_too_large_show_in_the_report():
  architecture = MLP(depth=1, norm=False)
  tokens = jnp.asarray(
    np.random.default_rng(0).integers(0, 256, (1, 256)), jnp.int32
  )

  def norm(factor):
    default = Titans(architecture)
    scale = default_step_scale(architecture, default.loss, default.optimizer)
    memory = Titans(architecture, step_scale=factor * scale)
    reports = jax.jit(memory_reports)(_model(memory), tokens)
    return float(reports[0].state_norm)

  usual, forced = norm(1.0), norm(400.0)
  assert np.isfinite(usual)
  assert not forced < 10 * usual  # nan counts, too
