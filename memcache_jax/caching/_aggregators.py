"""How a token combines the memories it can read: gates, and what they mix.

An aggregator turns the relevance of every stored memory into weights. Its
`gate` says where relevance comes from: "context" compares a router query u
with the pooled keys of each segment, "shared" uses the memory's own query
instead of u, "input" takes one logit per absolute segment from the layer, and
"none" gives every memory the weight 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.caching import _ranks
from memcache_jax.memories._base import Gate
from memcache_jax.ops import _checks

GateKind: TypeAlias = Literal["context", "shared", "input", "none"]
Pool: TypeAlias = Literal["mean", "sum"]


class Selection(NamedTuple):
  """A few cached memories per token, their weights, and that of the online.

  Attributes:
    index: of the memories; -1 for none.
    weights: of each.
    own: that of the online memory.
    others: weights of all cached memories that were not selected, which are 0
      and differentiated: the backward pass reads those memories, too. None:
      nothing is known of them.
  """

  index: Int[Array, "*rows r"]
  weights: Float[Array, "*rows r"]
  own: Float[Array, "*rows"]
  others: Float[Array, "*rows s"] | None = None

  def all_weights(self, slots: int) -> Float[Array, "*rows s"]:
    """The weights of all cached memories."""
    weights = _ranks.spread(self.weights, self.index, slots)
    return weights if self.others is None else weights + self.others


Weights: TypeAlias = tuple[Float[Array, "*rows s"], Float[Array, "*rows"]]


@dataclass(frozen=True)
class Aggregator:
  """Base of the ways to combine the online memory with the cached ones."""

  # Segments of a document that the gates know; None for any number.
  max_segments: ClassVar[int | None] = None
  # Tokens that share what the first of them selects.
  block: ClassVar[int] = 1

  @property
  def mixes_parameters(self) -> bool:
    """The weights average the parameters of the memories, which are then read
    once, instead of their reads."""
    return False

  @property
  def router(self) -> GateKind:
    """Where relevance comes from; "none" when it is not needed.

    Without it all tokens of a segment have the same weights.
    """
    return "none"

  @property
  def pool(self) -> Pool:
    """How the keys of a segment are pooled for the router."""
    return "mean"

  def gates(self) -> Mapping[str, Gate]:
    """Gates wanted from the layer besides those of the memory."""
    return {}

  def weights(
    self,
    logits: Float[Array, "*rows s"] | None,
    own_logit: Float[Array, "*rows"] | None,
    readable: Bool[Array, "*#rows s"],
  ) -> Weights:
    """Weights of the cached memories and of the online one.

    Args:
      logits: relevance of every cached memory; None without a router.
      own_logit: relevance of the online memory.
      readable: which cached memories a token may read.

    Returns:
      Both weights, of any shape that broadcasts to that of the logits.
    """
    raise NotImplementedError

  # A few memories per token, for ways that have `max_selected`.

  @property
  def max_selected(self) -> int | None:
    """Most cached memories that a token reads; None: all it can."""
    return None

  @property
  def draws(self) -> bool:
    """Whether noise is added to the relevance of memories in training."""
    return False

  def choose(
    self,
    scores: Float[Array, "*rows s"],
    readable: Bool[Array, "*#rows s"],
  ) -> Int[Array, "*rows r"]:
    """The memories that each token reads, -1 for none.

    Args:
      scores: relevance of every cached memory, with noise if there is any.
      readable: see `weights`.
    """
    raise NotImplementedError

  def gate_chosen(
    self,
    index: Int[Array, "*rows r"],
    logits: Float[Array, "*rows r"],
    own_logit: Float[Array, "*rows"],
    readable: Bool[Array, "*#rows s"],
    scores: Float[Array, "*rows s"],
  ) -> Selection:
    """The weights of chosen memories.

    Args:
      index: what was chosen.
      logits: relevance of it.
      own_logit: see `weights`.
      readable: see `weights`.
      scores: see `choose`.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class Residual(Aggregator):
  r"""Adds up the reads of all memories, ungated.

  .. math:: y_t = M_t^{(s)}(q_t) + \sum_{i<s} M^{(i)}(q_t)

  Memory Caching (arXiv 2602.24281), Eq. 6-7.
  """

  def weights(self, logits, own_logit, readable) -> Weights:
    del logits, own_logit
    ones = readable.astype(jnp.float32)
    return ones, jnp.ones(readable.shape[:-1], jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Gated(Aggregator):
  gate: GateKind = "context"
  pooling: Pool = "mean"
  max_segments: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

  def __post_init__(self):
    _checks.check_choice(
      gate=(self.gate, ("context", "shared", "input", "none")),
      pooling=(self.pooling, ("mean", "sum")),
    )
    if (self.gate == "input") != (self.max_segments is not None):
      raise ValueError(
        "`max_segments` must be given for gate 'input', and only there: "
        f"got gate={self.gate!r}, max_segments={self.max_segments!r}."
      )
    if self.max_segments is not None:
      _checks.check_positive(max_segments=self.max_segments)

  @property
  def router(self) -> GateKind:
    return self.gate

  @property
  def pool(self) -> Pool:
    return self.pooling

  def gates(self) -> Mapping[str, Gate]:
    match self.router:
      case "context":
        return {"u": Gate("connector")}
      case "input":
        return {"slot_logits": Gate("linear", width=self.max_segments)}
      case _:
        return {}

  def weights(self, logits, own_logit, readable) -> Weights:
    if self.gate == "none":
      ones = readable.astype(jnp.float32)
      return ones, jnp.ones(readable.shape[:-1], jnp.float32)
    assert logits is not None  # see `router`
    assert own_logit is not None
    return softmax(logits, own_logit, readable)


@dataclass(frozen=True)
class GatedResidual(Gated):
  r"""Adds up the reads of all memories, each with its own gate (GRM).

  .. math::
    y_t = \gamma_{t,s} M_t^{(s)}(q_t)
      + \sum_{i<s} \gamma_{t,i} M^{(i)}(q_t),
    \quad \gamma_t = \mathrm{softmax}_{i \le s} \langle u_t, \bar p_i \rangle

  Memory Caching (arXiv 2602.24281), Eq. 8-10. The pool of the current segment
  runs over its tokens up to and including t, so that nothing later is seen.

  Attributes:
    gate: where relevance comes from; see the module.
    pooling: mean or sum of a segment's keys.
    max_segments: most segments of a document, for gate "input" only; tokens
      of later segments become nan.
  """


@dataclass(frozen=True)
class MemorySoup(Gated):
  r"""Mixes the parameters of all memories with gates, and reads once.

  .. math::
    W^*_{t,j} = \gamma_{t,s} W^{(s)}_{t,j} + \sum_{i<s} \gamma_{t,i} W^{(i)}_j,
    \qquad y_t = M(q_t; W^*_t)

  Memory Caching (arXiv 2602.24281), Eq. 14-15. Equal to `GatedResidual` where
  reading is linear in the parameters. With gate "none" parameters add up.

  Attributes:
    gate: where relevance comes from; see the module.
    pooling: mean or sum of a segment's keys.
    max_segments: most segments of a document, for gate "input" only; tokens
      of later segments become nan.
  """

  @property
  def mixes_parameters(self) -> bool:
    return True


def softmax(
  logits: Float[Array, "*rows s"],
  own_logit: Float[Array, "*rows"],
  readable: Bool[Array, "*#rows s"],
) -> Weights:
  """Gates of the readable memories and of the online one, 1 together."""
  low = jnp.finfo(jnp.float32).min
  logits = jnp.where(readable, logits, low)
  top = jnp.maximum(jnp.max(logits, axis=-1, initial=low), own_logit)
  top = jax.lax.stop_gradient(top)
  parts = jnp.where(readable, jnp.exp(logits - top[..., None]), 0.0)
  own = jnp.exp(own_logit - top)
  # Sums by products, forwards and backwards: see `numerics.scale_rows`.
  ones = jnp.ones(parts.shape[-1:], jnp.float32)
  total = own + jnp.einsum("...s,s->...", parts, ones, precision="highest")
  return numerics.scale_rows(parts, 1 / total), own / total
