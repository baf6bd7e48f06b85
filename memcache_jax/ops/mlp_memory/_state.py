"""What an MLP memory carries from one call to the next."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int, Params
from memcache_jax.ops.mlp_memory._architecture import Architecture, weights_of
from memcache_jax.ops.mlp_memory._closing import Closing
from memcache_jax.ops.mlp_memory._loss import InnerLoss


class Tail(NamedTuple):
  """The last tokens of the running document, oldest first.

  Attributes:
    k: their keys.
    v: their values.
    gates: what the inner loss wants, and "step" where one is kept.
  """

  k: Float[Array, "b tail n feature"]
  v: Float[Array, "b tail n v"]
  gates: dict[str, Float[Array, "b tail n"]]


class MLPMemoryState(NamedTuple):
  """What `mlp_memory` carries from one call to the next, in float32.

  Attributes:
    theta: the parameters now, by name; leaves [b n ...].
    start: the parameters at the start of the running inner batch, where its
      gradients are taken; equal to `theta` between two inner batches.
    momentum: the momentum now, like theta; None without momentum.
    decay: product of the decays of the running inner batch, for the closings
      that want it.
    tail: the tokens that are written again: the window's, or those of the
      running inner batch when every pair has its coefficient.
    position: tokens of the running document so far.
  """

  theta: Params
  start: Params
  momentum: Params | None
  decay: Float[Array, "b n"] | None
  tail: Tail | None
  position: Int[Array, " b"]


class Mix(NamedTuple):
  """What every token reads instead of the online memory: a Memory Soup.

  Attributes:
    memories: stored weights, leaves [b s n ...].
    weights: of each stored memory, per token and head.
    own: weight of the online memory.
  """

  memories: Params
  weights: Float[Array, "b t n s"]
  own: Float[Array, "b t n"]


MAX_KEPT_BYTES = 2**26


class Rule(NamedTuple):
  """Everything static about one memory."""

  architecture: Architecture
  loss: InnerLoss
  closing: Closing
  inner_batch: int
  has_momentum: bool
  # Tokens kept from earlier calls, and the gates kept with them.
  tail: int
  tail_gates: tuple[str, ...]
  # Every pair of tokens of an inner batch has its own coefficient.
  pairwise: bool
  # Tokens read the weights from the start of their inner batch.
  delayed: bool
  # Parameters kept for a backward pass of one call, beyond which blocks are
  # grouped. Changes speed and memory only.
  max_kept_bytes: int

  @property
  def reads_own_batch(self) -> bool:
    """Whether tokens read what their inner batch writes before them."""
    return self.closing.reads_own_batch and not self.delayed


def make_rule(
  architecture: Architecture,
  loss: InnerLoss,
  closing: Closing,
  inner_batch: int,
  *,
  window: int = 1,
  has_momentum: bool = False,
  restart: Literal["none", "rows", "pairs"] = "none",
  delayed: bool = False,
  max_kept_bytes: int = MAX_KEPT_BYTES,
) -> Rule:
  """Puts the static description of a memory together.

  Args:
    architecture: the network.
    loss: the inner loss.
    closing: what happens at the end of an inner batch.
    inner_batch: tokens whose gradients are taken at the same weights.
    window: tokens written at each step.
    has_momentum: whether steps add up in a momentum.
    restart: "rows" and "pairs" compute weights from the start of the inner
      batch, with the coefficients of `row_scale` and of `coef`.
    delayed: whether tokens read the weights from the start of their batch.
    max_kept_bytes: of parameters, for a backward pass.
  """
  pairwise = restart != "none"
  gates = tuple(sorted(loss.gates()))
  return Rule(
    architecture,
    loss,
    closing,
    inner_batch,
    has_momentum,
    tail=inner_batch - 1 if pairwise else window - 1,
    tail_gates=(*gates, "step") if restart == "rows" else gates,
    pairwise=pairwise,
    delayed=delayed,
    max_kept_bytes=max_kept_bytes,
  )


def init_state(
  rule: Rule,
  params: Params,
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
) -> MLPMemoryState:
  """The state before the first token.

  Zeros come from contracting an empty slice of the inputs, which gives them
  their sharding on a mesh, whatever that is.
  """
  k0, v0 = k[:, :0].astype(jnp.float32), v[:, :0].astype(jnp.float32)
  zero = jnp.einsum("btnk->bn", k0)
  weights = weights_of(rule.architecture, params)
  theta = {
    name: x.astype(jnp.float32)[None]
    + zero.reshape(zero.shape + (1,) * (x.ndim - 1))
    for name, x in weights.items()
  }
  momentum = None
  if rule.has_momentum:
    momentum = {name: jnp.zeros_like(x) for name, x in theta.items()}
  tail = None
  if rule.tail:
    ones = jnp.ones((0, rule.tail), jnp.float32)
    tail = Tail(
      jnp.einsum("btnk,tw->bwnk", k0, ones),
      jnp.einsum("btnv,tw->bwnv", v0, ones),
      {name: jnp.einsum("btnk,tw->bwn", k0, ones) for name in rule.tail_gates},
    )
  return MLPMemoryState(
    theta=theta,
    start=jax.tree.map(jnp.copy, theta),  # a state may be donated
    momentum=momentum,
    decay=zero + 1.0 if rule.closing.tracks_decay else None,
    tail=tail,
    position=jnp.einsum("btnk->b", k0).astype(jnp.int32),
  )
