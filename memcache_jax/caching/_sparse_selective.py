"""Sparse selective caching: a few cached memories per token, chosen by it."""

from dataclasses import KW_ONLY, dataclass

import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.caching import _ranks
from memcache_jax.caching._aggregators import (
  Gated,
  GateKind,
  Selection,
)
from memcache_jax.caching._selection import HardTopK
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class SparseSelective(Gated):
  r"""Reads the online memory and the top-k cached ones (SSC).

  .. math::
    y_t = \gamma_{t,s} M_t^{(s)}(q_t)
      + \sum_{i \in R_t} \gamma_{t,i} M^{(i)}(q_t),
    \quad R_t = \mathrm{top}_k \langle u_t, \bar p_i \rangle

  Memory Caching (arXiv 2602.24281), Eq. 16-17, with the softmax over the
  selected memories and the online one. Ties go to the older memory. With gate
  "none" the router only selects, and all weights are 1.

  With blocks, tokens share what the first of their block selects, at positions
  0, `block`, 2 `block`, ... of a segment; each has its own gates for it. That
  reads no later token, and a stream carries the choice on. Tokens of a block
  read as one, but not what only a later one of them asks for.

  Where only what was selected is read, of many cached memories, derivatives
  are in reverse: `jax.grad` of `jax.grad`, and no `jax.jvp` or `jax.hessian`.

  Attributes:
    top_k: cached memories a token reads besides the online one.
    gate: where relevance comes from; see the module.
    pooling: mean or sum of a segment's keys.
    max_segments: most segments of a document, for gate "input" only; tokens
      of later segments become nan.
    selection: how the choice is trained: `HardTopK()`, `StraightThrough()` or
      `GumbelTopK()`. Without noise all of them read the same.
    block: tokens that share a selection.

  Example:
    >>> from memcache_jax.caching import SparseSelective, StraightThrough
    >>> sparse = SparseSelective(2, selection=StraightThrough(reads="all"))
    >>> sparse.block
    1
  """

  top_k: int = 2
  _: KW_ONLY
  selection: HardTopK = HardTopK()
  block: int = 1  # pyright: ignore[reportIncompatibleVariableOverride]

  def __post_init__(self):
    super().__post_init__()
    _checks.check_positive(top_k=self.top_k, block=self.block)
    if not isinstance(self.selection, HardTopK):
      raise ValueError(
        "`selection` must be HardTopK, StraightThrough or GumbelTopK: got "
        f"{self.selection!r}."
      )

  @property
  def router(self) -> GateKind:
    return "context" if self.gate == "none" else self.gate

  @property
  def max_selected(self) -> int:
    return self.top_k

  @property
  def draws(self) -> bool:
    return self.selection.draws

  def choose(
    self,
    scores: Float[Array, "*rows s"],
    readable: Bool[Array, "*#rows s"],
  ) -> Int[Array, "*rows r"]:
    slots = scores.shape[-1]
    scores = jnp.where(readable, scores, -jnp.inf)
    index = _ranks.largest(scores, min(self.top_k, slots))
    # What cannot be read comes last.
    count = jnp.sum(readable, axis=-1, keepdims=True)
    rank = jnp.arange(index.shape[-1]).reshape((1,) * (index.ndim - 1) + (-1,))
    return jnp.where(rank < count, index, -1)

  def gate_chosen(
    self,
    index: Int[Array, "*rows r"],
    logits: Float[Array, "*rows r"],
    own_logit: Float[Array, "*rows"],
    readable: Bool[Array, "*#rows s"],
    scores: Float[Array, "*rows s"],
  ) -> Selection:
    weights, own = super().weights(logits, own_logit, index >= 0)
    chosen = Selection(index, weights, own)
    return self.selection.train(chosen, scores, own_logit, readable)
