"""What a training step changes, and the optimiser that changes it."""

from dataclasses import dataclass

import jax
import optax
from flax import nnx
from jaxtyping import Array, Int, PyTree

from memcache_jax.layers import weight_decay_mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
  """Everything a step changes."""

  step: Int[Array, ""]
  params: nnx.State
  opt_state: PyTree


def schedule(
  peak: float, steps: int, warmup: int, final_fraction: float
) -> optax.Schedule:
  """A linear rise to the peak, then half a cosine down to a part of it."""
  warmup = max(1, warmup)
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=peak,
    warmup_steps=warmup,
    decay_steps=max(warmup + 1, steps),
    end_value=peak * final_fraction,
  )


def adamw(
  learning_rate: optax.Schedule,
  *,
  weight_decay: float,
  b1: float = 0.9,
  b2: float = 0.95,
  clip_norm: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW; the gradient's norm is clipped, biases and scales do not decay."""
  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    optax.adamw(
      learning_rate,
      b1=b1,
      b2=b2,
      weight_decay=weight_decay,
      mask=weight_decay_mask,
    ),
  )
