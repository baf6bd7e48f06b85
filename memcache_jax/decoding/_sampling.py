"""How the next token is chosen."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int, PRNGKeyArray
from memcache_jax.ops import _checks

# Logits over less would leave float32.
_COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
  """A way to choose the next token; checked when made.

  Attributes:
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: choose among this many likeliest tokens only; None for all.
    top_p: choose among the likeliest tokens that together reach this
      probability (after temperature and `top_k`), never fewer than one; None
      for all.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None

  def __post_init__(self):
    _checks.check_number(temperature=self.temperature, low=0)
    if 0 < self.temperature < _COLDEST:
      raise ValueError(
        f"`temperature` must be 0 or at least {_COLDEST}: "
        f"got {self.temperature}."
      )
    if self.top_k is not None:
      _checks.check_positive(top_k=self.top_k)
    if self.top_p is not None:
      _checks.check_number(top_p=self.top_p, low=0, high=1, open_low=True)

  def choose(
    self, logits: Float[Array, "b vocab"], key: PRNGKeyArray
  ) -> Int[Array, " b"]:
    """Draws one token per row; -1 for rows whose logits are not numbers."""
    logits = logits.astype(jnp.float32)
    wrong = jnp.any(jnp.isnan(logits), axis=-1)
    if self.temperature == 0:
      tokens = jnp.argmax(logits, axis=-1)
    else:
      tokens = jax.random.categorical(key, self.restrict(logits))
    return jnp.where(wrong, -1, tokens.astype(jnp.int32))

  def restrict(
    self, logits: Float[Array, "b vocab"]
  ) -> Float[Array, "b vocab"]:
    """Logits of the distribution that is drawn from: -inf where excluded."""
    if self.temperature != 0:
      logits = logits / self.temperature
    if self.top_k is not None:
      best = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0]
      logits = jnp.where(logits < best[:, -1:], -jnp.inf, logits)
    if self.top_p is not None:
      ordered = jnp.sort(logits, axis=-1, descending=True)
      probability = jax.nn.softmax(ordered, axis=-1)
      # Kept while what comes before has not reached top_p: at least the first.
      before = jnp.cumsum(probability, axis=-1) - probability
      kept = jnp.where(before < self.top_p, ordered, jnp.inf)
      least = jnp.min(kept, axis=-1, keepdims=True)
      logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
