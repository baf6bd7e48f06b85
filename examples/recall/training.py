"""One seed: train on an endless stream of rows, measure on fixed ones."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from examples.recall import model
from examples.recall.settings import Settings
from memcache_jax.layers import weight_decay_mask
from memcache_jax.models import next_token_loss, segment_gates
from memcache_jax.tasks import Task

# Streams of random numbers that never meet.
TRAIN, TEST = 0, 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
  """Everything a step changes."""

  params: nnx.State
  opt_state: PyTree


def optimizer(settings: Settings) -> optax.GradientTransformation:
  """AdamW with warm-up and cosine decay; biases and scales do not decay."""
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=settings.learning_rate,
    warmup_steps=max(1, settings.steps // 10),
    decay_steps=max(2, settings.steps),
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      schedule, weight_decay=settings.weight_decay, mask=weight_decay_mask
    ),
  )


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="state")
def train_step(
  settings: Settings,
  state: TrainState,
  tokens: Int[Array, "b t"],
  targets: Int[Array, "b t"],
  answer_mask: Bool[Array, "b t"],
) -> tuple[TrainState, Float[Array, ""]]:
  """One update; returns the loss of the answers, in nats, before it."""

  def loss(params):
    logits, _ = model.with_params(settings, params)(tokens)
    return next_token_loss(logits, targets, answer_mask)

  value, gradient = jax.value_and_grad(loss)(state.params)
  updates, opt_state = optimizer(settings).update(
    gradient, state.opt_state, state.params
  )
  params = cast(nnx.State, optax.apply_updates(state.params, updates))
  return TrainState(params, opt_state), value


@functools.partial(jax.jit, static_argnames="settings")
def predict(
  settings: Settings, params: nnx.State, tokens: Int[Array, "b t"]
) -> Int[Array, "b t"]:
  """The likeliest id at every place."""
  logits, _ = model.with_params(settings, params)(tokens)
  return jnp.argmax(logits, axis=-1)


@functools.partial(jax.jit, static_argnames="settings")
def read_gates(
  settings: Settings, params: nnx.State, tokens: Int[Array, "b t"]
) -> dict[int, Float[Array, "b t n s_and_online"]]:
  """The gates of every layer."""
  return segment_gates(model.with_params(settings, params), tokens)


def train(
  settings: Settings, seed: int, report: Callable[[int, float], None]
) -> nnx.State:
  """Trains from fresh weights; every row is seen once.

  Args:
    settings: sizes.
    seed: of the weights and the rows.
    report: called with the step and the mean loss since the last time, some
      twenty times.
  """
  params = model.initial_params(settings, jnp.asarray(seed))
  state = TrainState(params, optimizer(settings).init(params))
  task = settings.task
  stages = [stage for stage in task.stages for _ in range(stage.steps)]
  every, losses = -(-settings.steps // 20), []
  for step, stage in enumerate(stages, start=1):
    rng = np.random.default_rng([TRAIN, seed, step])
    rows = task.source(stage).batch(rng, settings.rows(stage.length))
    inputs = (rows.tokens, rows.targets, rows.answer_mask)
    state, loss = train_step(settings, state, *jax.device_put(inputs))
    losses.append(loss)
    if step % every == 0 or step == settings.steps:
      report(step, float(np.mean(losses)))
      losses = []
  return state.params


def accuracy(settings: Settings, params: nnx.State) -> dict[int, float]:
  """The score of the task on test rows, by their length."""
  return {
    length: _score(settings, params, length, test)
    for length, test in settings.task.tests.items()
  }


def _score(
  settings: Settings, params: nnx.State, length: int, test: Task
) -> float:
  rows = test.batch(np.random.default_rng([TEST]), settings.test_rows)
  size = min(settings.rows(length), settings.test_rows)
  predictions = []
  for start in range(0, settings.test_rows, size):
    part = rows.tokens[start : start + size]
    # The last part is filled up, so that all share one compilation.
    padded = np.resize(part, (size, length))
    predictions.append(predict(settings, params, padded)[: len(part)])
  return settings.task.score(np.concatenate(predictions), rows)


def gates(settings: Settings, params: nnx.State) -> dict[int, np.ndarray]:
  """What the tokens of the first row of the shortest test read, by layer.

  Returns:
    [t n s_and_online] of every layer.
  """
  test = settings.task.tests[min(settings.task.tests)]
  rows = test.batch(np.random.default_rng([TEST]), settings.test_rows)
  found = read_gates(settings, params, rows.tokens[:1])
  return {layer: np.asarray(x[0]) for layer, x in found.items()}
