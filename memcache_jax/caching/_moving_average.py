"""Averages of memories, for models that were trained without a cache."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from memcache_jax.caching._aggregators import Aggregator, Weights
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class MovingAverage(Aggregator):
  r"""The average of all memories, for a model trained without a cache.

  .. math::
    W^*_t = \frac{1}{s} \Big(W_t^{(s)} + \sum_{i<s} W^{(i)}\Big),
    \qquad y_t = M(q_t; W^*_t)

  Post-training caching, Memory Caching (arXiv 2602.24281), section 4.3: it has
  no gates, and so no weights to train. The trained memory was never reset:
  use it with `write_mode="checkpoint"`. Whether it helps a model is to be
  measured, not assumed.

  With a `rate` r the average is one that moves with the segments, the online
  memory as the last of them: `A_1 = W^(1)`, `A_i = (1 - r) A_{i-1} + r W^(i)`.

  Attributes:
    of: "parameters": they are averaged, and the average is read. "outputs":
      the memories are read, and the reads averaged; the same for a memory that
      is linear in its parameters.
    rate: weight of the newest memory, in (0, 1]; None for equal weights.

  Example:
    >>> from memcache_jax.caching import Cached, Constant, MovingAverage
    >>> from memcache_jax.memories import GatedDelta
    >>> trained = GatedDelta()
    >>> cached = Cached(trained, Constant(64), MovingAverage(), "checkpoint")
    >>> cached.gates() == trained.gates()
    True
  """

  of: Literal["parameters", "outputs"] = "parameters"
  rate: float | None = None

  def __post_init__(self):
    _checks.check_choice(of=(self.of, ("parameters", "outputs")))
    if self.rate is not None:
      _checks.check_number(rate=self.rate, low=0, high=1, open_low=True)

  @property
  def mixes_parameters(self) -> bool:
    return self.of == "parameters"

  def weights(self, logits, own_logit, readable) -> Weights:
    del logits, own_logit
    ones = readable.astype(jnp.float32)
    total = jnp.sum(ones, axis=-1)
    if self.rate is None:
      total = 1.0 + total
      return ones / total[..., None], 1.0 / total
    # Memories come oldest first: how often each has been averaged with newer
    # ones, the online one included. The oldest entered with weight 1.
    times = 1.0 + total[..., None] - jnp.cumsum(ones, axis=-1)
    first = times == total[..., None]
    weights = (1.0 - self.rate) ** times * jnp.where(first, 1.0, self.rate)
    return weights * ones, jnp.where(total > 0, self.rate, 1.0)
