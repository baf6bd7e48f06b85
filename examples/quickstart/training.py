"""One jitted step, and the loop around it."""

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from examples.quickstart import model
from examples.quickstart.settings import Settings
from examples.train_state import TrainState, adamw, schedule
from memcache_jax.models import next_token_loss

BITS_PER_NAT = 1 / math.log(2)


def optimizer(settings: Settings) -> optax.GradientTransformation:
  """AdamW with warm-up and cosine decay."""
  rate = schedule(
    settings.learning_rate,
    settings.steps,
    warmup=settings.steps // 20,
    final_fraction=1 / 20,
  )
  return adamw(rate, weight_decay=settings.weight_decay)


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
