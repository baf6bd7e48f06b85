"""The arrays of one call, and how it is cut."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Bool, Float

WriteMode: TypeAlias = Literal["independent", "checkpoint"]


class Inputs(NamedTuple):
  """The arguments of `cached_linear_attention` that have gradients."""

  q: Float[Array, "b t n k"]
  k: Float[Array, "b t n k"]
  v: Float[Array, "b t n v"]
  weights: Float[Array, "b t n slots"]
  own_weight: Float[Array, "b t n"]
  log_decay: Float[Array, "b t n"] | None
  write: Float[Array, "b t n"] | None
  memories: Float[Array, "b s n k v"] | None
  state: Float[Array, "b n k v"] | None


@dataclass(frozen=True)
class Cut:
  """How tokens fall into segments.

  Attributes:
    length: tokens of a segment.
    tokens: of the call.
    carried: memories from before the call.
    write_mode: what a segment starts from.
  """

  length: int
  tokens: int
  carried: int
  write_mode: WriteMode

  @property
  def segments(self) -> int:
    return -(-self.tokens // self.length)


def readable(
  weights: Float[Array, "b t n slots"], cut: Cut
) -> Float[Array, "b t n slots"]:
  """Zero for states that a token must not read: its own and later ones."""
  segment = jnp.arange(weights.shape[1]) // cut.length
  slot = jnp.arange(weights.shape[3]) - cut.carried
  earlier = slot[None] < segment[:, None]
  return jnp.where(earlier[None, :, None], weights.astype(jnp.float32), 0.0)


def split(x: Float[Array, "b t ..."], cut: Cut) -> Float[Array, "b g c ..."]:
  """Tokens by segments; the last one is filled up with zeros."""
  pad = [(0, 0), (0, cut.segments * cut.length - x.shape[1])]
  x = jnp.pad(x, pad + [(0, 0)] * (x.ndim - 2))
  return rearrange(x, "b (g c) ... -> b g c ...", c=cut.length)


def fresh_segments(
  fresh: Bool[Array, "b g"] | None, cut: Cut, batch: int
) -> Bool[Array, "b g"]:
  """Segments that start from nothing, whatever stood before them."""
  if fresh is None:
    fresh = jnp.zeros((batch, cut.segments), bool)
  if cut.write_mode == "independent":
    fresh = fresh | (jnp.arange(cut.segments) > 0)[None]
  return fresh
