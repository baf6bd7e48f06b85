"""How gradients pass through a choice, and what it is made by in training."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.caching import _ranks
from memcache_jax.caching._aggregators import Selection as Chosen
from memcache_jax.caching._aggregators import softmax
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class HardTopK:
  """The k most relevant memories; no gradient reaches any other.

  Memory Caching (arXiv 2602.24281), Eq. 16: exact, for the function that is
  computed. A memory that would have been the better choice is never told so.
  """

  @property
  def draws(self) -> bool:
    """Whether noise is added to the relevance of memories in training."""
    return False

  def train(
    self,
    chosen: Chosen,
    scores: Float[Array, "*rows s"],
    own_logit: Float[Array, "*rows"],
    readable: Bool[Array, "*#rows s"],
  ) -> Chosen:
    """The same weights, with the gradient they shall have.

    Args:
      chosen: the weights as they are.
      scores: what the memories were chosen by.
      own_logit: relevance of the online memory.
      readable: which cached memories a token may read.
    """
    del scores, own_logit, readable
    return chosen


@dataclass(frozen=True)
class StraightThrough(HardTopK):
  r"""Hard top-k forwards, the softmax over all memories backwards.

  .. math::
    \partial \gamma_{t,i} := \partial p_{t,i}, \quad
    p_t = \mathrm{softmax}_{i \le s}(\langle u_t, \bar p_i \rangle / \tau)

  The straight-through estimator (arXiv 1308.3432, section 2.3), with a softmax
  as in arXiv 1611.01144, section 2.2. Values are those of `HardTopK`. So are
  the gradients of what memories hold and of queries; those of relevance, of
  router queries and pooled keys, reach memories that were not selected:

  * ``reads="selected"``: reads nothing more. It is the gradient of the output
    in which all memories are weighed and those not selected read as 0: their
    relevance falls where what was selected is useful, and rises where it does
    harm, alike for all of them but for their weight.
  * ``reads="all"``: the backward pass reads all memories, so that each that
    would have helped rises. It costs about what that of `GatedResidual` does.

  Either is biased. With gate "none", whose router has no gradient otherwise,
  it is of the same softmax.

  Attributes:
    reads: which memories the backward pass reads.
    temperature: of that softmax.
  """

  reads: Literal["selected", "all"] = "selected"
  temperature: float = 1.0

  def __post_init__(self):
    _checks.check_choice(reads=(self.reads, ("selected", "all")))
    _checks.check_number(temperature=self.temperature, low=0.0, open_low=True)

  def train(
    self,
    chosen: Chosen,
    scores: Float[Array, "*rows s"],
    own_logit: Float[Array, "*rows"],
    readable: Bool[Array, "*#rows s"],
  ) -> Chosen:
    soft, own = softmax(
      scores / self.temperature, own_logit / self.temperature, readable
    )
    index = chosen.index
    others = None
    if self.reads == "all":
      missed = jnp.where(_ranks.among(soft.shape[-1], index), 0.0, soft)
      others = _as(jnp.zeros_like(missed), missed)
    return Chosen(
      index,
      _as(chosen.weights, jnp.where(index >= 0, _ranks.at(soft, index), 0.0)),
      _as(chosen.own, own),
      others,
    )


@dataclass(frozen=True)
class GumbelTopK(StraightThrough):
  r"""Draws k memories in training, without replacement.

  .. math::
    R_t = \mathrm{top}_k (\langle u_t, \bar p_i \rangle + g_{t,i}), \quad
    g_{t,i} = -\log(-\log U_{t,i})

  The Gumbel-top-k trick (arXiv 1903.06059, section 2): a sample from the
  softmax of relevance, one after another of those left. Their gates are as
  always, without noise. Backwards as `StraightThrough`, of the Gumbel-softmax
  (arXiv 1611.01144): noise added, divided by the temperature; the online
  memory, which is not drawn, has no noise.

  Nothing is drawn, and the most relevant are read, without `seeds` of the
  tokens: without `rngs` in a call of a layer or a model, as in evaluation and
  decoding.

  Attributes:
    reads: which memories the backward pass reads.
    temperature: of the softmax that is differentiated.
  """

  @property
  def draws(self) -> bool:
    return True


@jax.custom_jvp
def _as(value: Array, soft: Array) -> Array:
  """The value, with the gradient of `soft`."""
  del soft
  return value


@_as.defjvp
def _as_jvp(primals, tangents):
  return primals[0], tangents[1]
