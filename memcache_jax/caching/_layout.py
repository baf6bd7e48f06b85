"""Tokens of one call laid out segment by segment."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from memcache_jax import sharding, token_layout
from memcache_jax.array_typing import Array, Bool, Int, PyTree
from memcache_jax.memories._base import Tokens


@dataclass(frozen=True)
class Layout:
  """Segments of a call, each a row of whole length with empty places.

  Segment 0 is the one that was open before the call. None stands for what is
  known without looking: every place filled, no document start.

  Attributes:
    grid: how tokens move, or None where they stay in order.
    length: tokens per segment.
    tokens: tokens of the call.
    valid: places that hold a token.
    fresh: segments at which a document starts.
    ended: segments that a flagged token ended.
    last: the last segment in use.
    lost: rows that did not fit, or None where every row does.
  """

  grid: token_layout.Grid | None
  length: int
  tokens: int
  valid: Bool[Array, "b g c"] | None
  fresh: Bool[Array, "b g"] | None
  last: Int[Array, " b"] | int
  ended: Bool[Array, "b g"] | None = None
  lost: Bool[Array, " b"] | None = None

  def spread(self, tree: PyTree) -> PyTree:
    """[b t ...] -> [b g c ...]; empty places hold zeros."""
    if self.grid is None:
      return jax.tree.map(self._split, tree)
    b, g, c = self.grid.source.shape
    flat = token_layout.take_tokens(tree, self.grid.source.reshape(b, g * c))
    flat = token_layout.zero_masked(flat, self.grid.valid.reshape(b, g * c))
    return jax.tree.map(lambda x: x.reshape(b, g, c, *x.shape[2:]), flat)

  def collect(self, tree: PyTree) -> PyTree:
    """[b g c ...] -> [b t ...]; zero for masked tokens, nan for lost ones."""

    def one(x):
      x = x.reshape(x.shape[0], -1, *x.shape[3:])
      if self.grid is None:
        x = x[:, : self.tokens]
      else:
        x = token_layout.take_tokens(x, self.grid.target)
        x = token_layout.zero_masked(x, self.grid.placed)
      if self.lost is None:
        return x
      lost = self.lost.reshape((-1,) + (1,) * (x.ndim - 1))
      return jnp.where(lost, jnp.full((), jnp.nan, x.dtype), x)

    return jax.tree.map(one, tree)

  def _split(self, x):
    pad = -x.shape[1] % self.length
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, self.length, *x.shape[2:])


def lay_out(tokens: Tokens, state, segments) -> Layout:
  """Plans the segments of a call.

  Args:
    tokens: the tokens of the call.
    state: of the cache before it; None for a new sequence.
    segments: where to cut.

  Raises:
    ValueError: when the number of document starts cannot be known.
  """
  b, t = tokens.q.shape[:2]
  length = segments.length
  ends = tokens.segment_ends
  if state is None and all(
    flags is None for flags in (tokens.mask, tokens.starts, ends)
  ):
    blocks = -(-t // length)
    valid = None
    if t % length:
      valid = jnp.arange(blocks * length).reshape(1, blocks, length) < t
      valid = jnp.broadcast_to(valid, (b, blocks, length))
    return Layout(None, length, t, valid, None, blocks - 1)
  if _is_packed(tokens, state, length):
    starts = tokens.starts.reshape(b, -1, length)
    return Layout(
      grid=None,
      length=length,
      tokens=t,
      valid=None,
      fresh=starts[:, :, 0],
      last=t // length - 1,
      lost=jnp.any(starts[:, :, 1:], axis=(1, 2)),
    )
  mask = jnp.ones((b, t), bool) if tokens.mask is None else tokens.mask
  starts = jnp.zeros((b, t), bool) if tokens.starts is None else tokens.starts
  if state is None:
    blocks = -(-t // length) + _unaligned_starts(tokens)
    position = jnp.zeros((b,), jnp.int32)
  else:
    blocks = segments.blocks(t, _unaligned_starts(tokens))
    position = state.position
  mask, starts, position = sharding.rows_like(
    (mask, starts, position), tokens.q
  )
  ended = None
  if ends is not None:
    blocks = min(blocks + segments.max_flagged, t + 1)
    number, running = token_layout.blocks_before(
      mask, starts, position, length, ends
    )
    if state is not None:
      number += jnp.where(running, state.count[:, None], 0)
    # Beyond its room a document is lost, and needs no rows of its own.
    ends &= mask & (number < segments.max_flagged)
  grid = token_layout.align(mask, starts, position, length, blocks, ends)
  if ends is not None:
    row = jnp.where(grid.placed & ends, grid.target // length, blocks)
    ended = jnp.full_like(mask, False, shape=(b, blocks))
    ended = token_layout.put_rows(ended, row, ends)
  return Layout(
    grid=grid,
    length=length,
    tokens=t,
    valid=grid.valid,
    fresh=grid.fresh,
    last=grid.blocks - 1,
    ended=ended,
    lost=grid.overflow,
  )


def check_room(cached, tokens: Tokens) -> None:
  """A gate per absolute segment must exist for every segment of a call."""
  limit = cached.aggregate.max_segments
  if limit is None or tokens.starts is not None or tokens.mask is not None:
    return
  segments = -(-tokens.q.shape[1] // cached.segments.length)
  if segments > limit:
    raise ValueError(
      f"`max_segments` must be at least {segments} for a call of "
      f"{tokens.q.shape[1]} tokens: got {limit}."
    )


def _is_packed(tokens: Tokens, state, length: int) -> bool:
  """Whole segments of a new sequence, each of one document: nothing moves."""
  return (
    state is None
    and tokens.mask is None
    and tokens.segment_ends is None
    and tokens.max_unaligned_starts == 0
    and tokens.q.shape[1] > 0
    and tokens.q.shape[1] % length == 0
  )


def _unaligned_starts(tokens: Tokens) -> int:
  if tokens.starts is None:
    return 0
  if tokens.max_unaligned_starts is not None:
    return tokens.max_unaligned_starts
  if isinstance(tokens.starts, Tracer):
    raise ValueError(
      "`max_unaligned_starts` must be given together with `starts` under a "
      "jax transformation, since it fixes the size of the padded layout: an "
      "upper bound on the document starts per row and call that do not fall "
      "on a segment border (0 for documents packed to segment borders)."
    )
  return int(np.max(np.sum(np.asarray(tokens.starts), axis=1), initial=0))
