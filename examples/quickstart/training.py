"""One jitted step, and the loop around it."""

import functools
import math
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from examples.quickstart import model
from examples.quickstart.settings import Settings
from memcache_jax.layers import weight_decay_mask
from memcache_jax.models import next_token_loss

BITS_PER_NAT = 1 / math.log(2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
  """Everything a step changes."""

  step: Int[Array, ""]
  params: nnx.State
  opt_state: PyTree


def optimizer(settings: Settings) -> optax.GradientTransformation:
  """AdamW with warm-up and cosine decay; biases and scales do not decay."""
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=settings.learning_rate,
    warmup_steps=max(1, settings.steps // 20),
    decay_steps=max(2, settings.steps),
    end_value=settings.learning_rate / 20,
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      schedule,
      b1=0.9,
      b2=0.95,
      weight_decay=settings.weight_decay,
      mask=weight_decay_mask,
    ),
  )


@functools.partial(jax.jit, static_argnames="settings")
def initial_state(settings: Settings) -> TrainState:
  """The state before the first step."""
  return begin(settings, model.initial_params(settings))


def begin(settings: Settings, params: nnx.State) -> TrainState:
  """The state of any model before the first step."""
  opt_state = optimizer(settings).init(params)
  return TrainState(jnp.zeros((), jnp.int32), params, opt_state)


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="state")
def train_step(
  settings: Settings, state: TrainState, batch: Int[Array, "b t_plus_1"]
) -> tuple[TrainState, Float[Array, ""]]:
  """One update; returns the loss in bits per byte before it."""
  return update(settings, model.structure(settings), state, batch)


def update(
  settings: Settings,
  structure: nnx.GraphDef,
  state: TrainState,
  batch: Int[Array, "b t_plus_1"],
) -> tuple[TrainState, Float[Array, ""]]:
  """One update of any model, given all of it but its numbers."""

  def loss(params):
    logits, _ = nnx.merge(structure, params)(batch[:, :-1])
    return next_token_loss(logits, batch[:, 1:])

  value, gradient = jax.value_and_grad(loss)(state.params)
  updates, opt_state = optimizer(settings).update(
    gradient, state.opt_state, state.params
  )
  params = cast(nnx.State, optax.apply_updates(state.params, updates))
  return TrainState(state.step + 1, params, opt_state), value * BITS_PER_NAT
