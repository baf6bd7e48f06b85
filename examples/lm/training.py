"""One step, and one measurement, as functions that jax compiles."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from examples import functional
from examples.lm.model import model_config
from examples.lm.packing import Batch
from examples.lm.settings import Settings
from examples.train_state import TrainState, adamw, schedule
from memcache_jax.models import (
  memory_reports,
  next_token_loss,
  segment_gates,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
  """What a step says of itself, all before the update.

  Attributes:
    loss: nats per token.
    gradient_norm: before clipping.
    learning_rate: of this step.
    tokens: that counted in the loss.
  """

  loss: Float[Array, ""]
  gradient_norm: Float[Array, ""]
  learning_rate: Float[Array, ""]
  tokens: Float[Array, ""]


def _learning_rate(settings: Settings) -> optax.Schedule:
  options = settings.optimizer
  return schedule(
    options.peak, settings.steps, options.warmup, options.final_fraction
  )


def optimizer(settings: Settings) -> optax.GradientTransformation:
  """AdamW with warm-up, cosine, clipping and masked weight decay."""
  options = settings.optimizer
  return adamw(
    _learning_rate(settings),
    weight_decay=options.weight_decay,
    b1=options.b1,
    b2=options.b2,
    clip_norm=options.clip_norm,
  )


def initial_state(settings: Settings) -> TrainState:
  """The state before the first step."""
  params = functional.initial_params(
    model_config(settings.model), settings.seed
  )
  return TrainState(
    jnp.zeros((), jnp.int32), params, optimizer(settings).init(params)
  )


def summed_loss(
  settings: Settings, params: nnx.State, batch: Batch, z_loss: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Nats of all tokens that count, and their number."""
  config = model_config(settings.model)
  model = functional.with_params(config, params)
  data = settings.data
  # Without the mask: what lies behind a document is read by nothing that
  # counts, and forgotten where the next one starts.
  logits, _ = model(
    batch.tokens,
    starts=batch.starts,
    max_unaligned_starts=(
      0 if data.packing == "aligned" else data.max_documents
    ),
  )
  count = jnp.sum(batch.mask, dtype=jnp.float32)
  loss = next_token_loss(logits, batch.targets, batch.mask, z_loss=z_loss)
  return loss * count, count


def gradient(
  settings: Settings, params: nnx.State, batch: Batch
) -> tuple[Float[Array, ""], nnx.State, Float[Array, ""]]:
  """Mean loss, its gradient, and the number of tokens.

  With `accumulate` above 1 the batch goes through the model in parts; sums
  are divided only at the end, so that the result is that of the whole batch.
  """
  parts = settings.optimizer.accumulate

  def part(params, batch):
    return summed_loss(settings, params, batch, settings.optimizer.z_loss)

  grad = jax.value_and_grad(part, has_aux=True)
  if parts == 1:
    (loss, count), gradient = grad(params, batch)
  else:
    # Every part holds rows of every device.
    batches = jax.tree.map(
      lambda x: rearrange(x, "(b parts) t -> parts b t", parts=parts), batch
    )

    def add(total, batch):
      return jax.tree.map(jnp.add, total, grad(params, batch)), None

    first = jax.tree.map(lambda x: x[0], batches)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad, params, first))
    ((loss, count), gradient), _ = jax.lax.scan(add, zeros, batches)
  scale = 1 / jnp.maximum(count, 1)
  return loss * scale, jax.tree.map(lambda g: g * scale, gradient), count


def train_step(
  settings: Settings, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
  """One update."""
  loss, grads, count = gradient(settings, state.params, batch)
  metrics = Metrics(
    loss=loss,
    gradient_norm=optax.tree.norm(grads),
    learning_rate=jnp.asarray(
      _learning_rate(settings)(state.step), jnp.float32
    ),
    tokens=count,
  )
  updates, opt_state = optimizer(settings).update(
    grads, state.opt_state, state.params
  )
  params = cast(nnx.State, optax.apply_updates(state.params, updates))
  return TrainState(state.step + 1, params, opt_state), metrics


def evaluation_step(
  settings: Settings, params: nnx.State, batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Nats of all tokens that count, and their number."""
  return summed_loss(settings, params, batch, z_loss=0.0)


def watch(
  settings: Settings, params: nnx.State, batch: Batch
) -> dict[str, Float[Array, ""]]:
  """What the memories do with the first tokens of every row.

  Returns:
    Of all layers that have it: the mean inner loss, the largest norm of a
    memory, and the mean entropy, in nats, of the gates of cached memories,
    where the tokens are more than one segment.
  """
  model = functional.with_params(model_config(settings.model), params)
  tokens, mask = (
    x[:, : settings.watch_tokens] for x in (batch.tokens, batch.mask)
  )
  reports = memory_reports(model, tokens, mask=mask).values()
  losses = [x.inner_loss for x in reports if x.inner_loss is not None]
  norms = [x.state_norm for x in reports]
  entropies = []
  for gates in segment_gates(model, tokens, mask=mask).values():
    if gates.shape[-1] == 1:
      continue  # of the online memory alone
    # 0 log 0 is 0, and masked tokens have no gates.
    entropy = jnp.sum(jax.scipy.special.entr(gates))
    count = jnp.maximum(jnp.sum(mask), 1) * gates.shape[2]
    entropies.append(entropy / count.astype(jnp.float32))
  scalars = {}
  if losses:
    scalars["inner_loss"] = jnp.mean(jnp.stack(losses))
  if norms:
    scalars["state_norm"] = jnp.max(jnp.stack(norms))
  if entropies:
    scalars["gate_entropy"] = jnp.mean(jnp.stack(entropies))
  return scalars


@functools.cache
def compiled_watch(settings: Settings, shardings) -> Callable:
  """`watch`, jitted for a layout."""
  return jax.jit(
    functools.partial(watch, settings),
    in_shardings=(shardings.state.params, shardings.batch),
    out_shardings=shardings.everywhere,
  )


@functools.cache
def compiled(settings: Settings, shardings) -> tuple:
  """`train_step` and `evaluation_step`, jitted for a layout.

  Sessions of one process share them, and so compile once.

  Args:
    settings: of the run.
    shardings: a `examples.lm.sharding.Layout`.
  """
  step = jax.jit(
    functools.partial(train_step, settings),
    donate_argnums=0,
    in_shardings=(shardings.state, shardings.batch),
    out_shardings=(shardings.state, shardings.everywhere),
  )
  measure = jax.jit(
    functools.partial(evaluation_step, settings),
    in_shardings=(shardings.state.params, shardings.batch),
    out_shardings=shardings.everywhere,
  )
  return step, measure
