"""Sparse selective caching: a few cached memories per token, chosen by it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool
from memcache_jax.caching._aggregators import (
  Gated,
  GateKind,
  Selection,
  Weights,
)
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class SparseSelective(Gated):
  r"""Reads the online memory and the top-k cached ones (SSC).

  .. math::
    y_t = \gamma_{t,s} M_t^{(s)}(q_t)
      + \sum_{i \in R_t} \gamma_{t,i} M^{(i)}(q_t),
    \quad R_t = \mathrm{top}_k \langle u_t, \bar p_i \rangle

  Memory Caching (arXiv 2602.24281), Eq. 16-17, with the softmax over the
  selected memories and the online one. Ties go to the older memory. No
  gradient reaches a memory that was not selected. With gate "none" the router
  only selects, and all weights are 1.

  Attributes:
    top_k: cached memories a token reads besides the online one.
    gate: where relevance comes from; see the module.
    pooling: mean or sum of a segment's keys.
    max_segments: most segments of a document, for gate "input" only; tokens
      of later segments become nan.
  """

  top_k: int = 2

  def __post_init__(self):
    super().__post_init__()
    _checks.check_positive(top_k=self.top_k)

  @property
  def router(self) -> GateKind:
    return "context" if self.gate == "none" else self.gate

  def select(self, logits, own_logit, readable) -> Selection:
    index, chosen, found = _top_k(logits, readable, self.top_k)
    weights, own = super().weights(chosen, own_logit, found)
    return Selection(jnp.where(found, index, -1), weights, own)

  def weights(self, logits, own_logit, readable) -> Weights:
    selection = self.select(logits, own_logit, readable)
    hot = _one_hot(selection.index, logits.shape[-1])
    parts = jnp.where(hot, selection.weights[..., None], 0.0)
    return jnp.sum(parts, axis=-2), selection.own


def _top_k(logits, readable, top_k):
  """Index, logit and whether there is one, for each rank."""
  slots = logits.shape[-1]
  readable = jnp.broadcast_to(readable, logits.shape)
  order = jnp.where(readable, logits, -jnp.inf)
  _, index = jax.lax.top_k(jax.lax.stop_gradient(order), min(top_k, slots))
  # Not a gather, whose gradient would be a scatter.
  hot = _one_hot(index, slots)
  chosen = jnp.sum(jnp.where(hot, logits[..., None, :], 0.0), axis=-1)
  found = jnp.any(hot & readable[..., None, :], axis=-1)
  return index, chosen, found


def _one_hot(index, slots) -> Bool[Array, "*rows r s"]:
  slot = jnp.arange(slots).reshape((1,) * index.ndim + (-1,))
  return index[..., None] == slot
