"""What a cache of fixed size forgets when it is full, so that streams go on.

Memory Caching (arXiv 2602.24281) keeps every segment. These rules are ours;
each is a part of the model, to be measured and not assumed to be harmless.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Int
from memcache_jax.caching._segments import Constant, Segments
from memcache_jax.caching._state import CacheState, to_front
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class CachePolicy:
  """Base of the ways to keep a cache at `slots` memories for ever.

  With one, a state has `slots` places whatever `max_length` says, and no
  document is too long for it. A rule that asks only how many segments there
  have been costs nothing: all segments of a call are still read together. One
  that looks at the memories takes segments one after another, and training
  through it keeps a copy of the cache for each.

  Attributes:
    slots: memories of a document that are kept.
  """

  slots: int = 64

  def __post_init__(self):
    _checks.check_positive(slots=self.slots)

  @property
  def takes_turns(self) -> bool:
    """Whether what is kept depends on more than the number of segments."""
    return False

  @property
  def counts_use(self) -> bool:
    """Whether the state counts how much each memory is read."""
    return False

  def readable(
    self, n: Int[Array, "*#rows"], stored: Int[Array, "*#rows"]
  ) -> Bool[Array, "*#rows"]:
    """Whether tokens of segment `n` read the memory cached after `stored`."""
    return (stored >= 0) & (stored < n)

  def make_room(self, cached, state: CacheState, done: Bool[Array, " b"]):
    """Frees a place in the full rows that have finished a segment.

    Args:
      cached: the `Cached` memory.
      state: after the last token of the segment, which is not cached yet.
      done: rows that have finished one.

    Returns:
      The state, with the memories that are left first, in order.
    """
    del cached
    after = state.count + done.astype(jnp.int32)
    return to_front(state, self.readable(after[:, None], state.index))


@dataclass(frozen=True)
class DropOldest(CachePolicy):
  """Keeps the last `slots` segments: a sliding window of memories.

  Equal to a cache without a limit as long as a document has at most `slots`
  complete segments before a token; after that the oldest is forgotten at the
  end of every segment.

  Example:
    >>> from memcache_jax.caching import Cached, Constant, DropOldest
    >>> from memcache_jax.memories import HeadShape, Linear
    >>> memory = Cached(Linear(), Constant(64), policy=DropOldest(slots=8))
    >>> memory.init_state({}, HeadShape(2, 4, 4), 1).index.shape
    (1, 8)
  """

  def readable(
    self, n: Int[Array, "*#rows"], stored: Int[Array, "*#rows"]
  ) -> Bool[Array, "*#rows"]:
    return super().readable(n, stored) & (stored >= n - self.slots)


@dataclass(frozen=True)
class LogarithmicThinning(CachePolicy):
  r"""Keeps recent segments densely and older ones ever more sparsely.

  With segments e = 1, 2, ... of a document and n of them complete, segment e
  is kept while

  .. math:: n - e < 2^{l + 1}, \quad l = \min(\mathrm{ctz}(e), slots - 2)

  where ctz(e) is how often 2 divides e. That is one segment per power of two
  and two of the highest, so `slots` memories span the last 2^(slots - 1)
  segments with gaps that double; beyond, the oldest is dropped. What falls out
  is forgotten (with checkpoints a later memory still holds it, up to its own
  forgetting). For blocks that have read all their segments see `Logarithmic`.
  """

  def __post_init__(self):
    super().__post_init__()
    _check_two(self.slots)

  def readable(
    self, n: Int[Array, "*#rows"], stored: Int[Array, "*#rows"]
  ) -> Bool[Array, "*#rows"]:
    end = stored + 1
    # 2^30 segments are more than an int32 can tell apart doubled.
    highest = 1 << min(self.slots - 2, 29)
    size = jnp.clip(end & -end, 1, highest)
    return super().readable(n, stored) & (n - end < 2 * size)


@dataclass(frozen=True)
class KeepMostUsed(CachePolicy):
  """Drops the memory that has been read least.

  The use of a memory is the weight with which tokens have read it, averaged
  over heads, per segment since it was cached: a new memory is not worse off
  than an old one. When a segment ends and the cache is full, the memory of
  least use makes room, the older of equals. Weights have no gradient through
  this choice. On a mesh with explicit axes rows may be spread, heads not.
  """

  @property
  def takes_turns(self) -> bool:
    return True

  @property
  def counts_use(self) -> bool:
    return True

  def make_room(self, cached, state: CacheState, done: Bool[Array, " b"]):
    del cached
    assert state.use is not None  # see `counts_use`
    full = done & (state.index[:, -1] >= 0)
    segments = jnp.maximum(state.count[:, None] - state.index, 1)
    least = jnp.argmin(state.use / segments.astype(jnp.float32), axis=1)
    slot = jnp.arange(self.slots)[None]
    drop = full[:, None] & (slot == least[:, None])
    return to_front(state, (state.index >= 0) & ~drop)


@dataclass(frozen=True)
class MergeNeighbours(CachePolicy):
  """Makes two neighbouring memories into one.

  When a segment ends and the cache is full, the two neighbours that stand for
  the fewest segments together become one memory, the oldest pair of equals.

  Memories that are read linearly are added up: under `Residual` that changes
  no output, however long the stream. Parameters of all others, networks above
  all, are averaged by the segments they stand for: an approximation, without a
  claim that the result reads as both did. Pooled keys are averaged likewise,
  or added with pooling "sum". A gate by segment number is that of the newest.
  On a mesh with explicit axes rows may be spread, heads not.
  """

  def __post_init__(self):
    super().__post_init__()
    _check_two(self.slots)

  @property
  def takes_turns(self) -> bool:
    return True

  def make_room(self, cached, state: CacheState, done: Bool[Array, " b"]):
    full = done & (state.index[:, -1] >= 0)
    before = jnp.pad(state.index[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    size = (state.index - before).astype(jnp.float32)
    first = jnp.argmin(size[:, :-1] + size[:, 1:], axis=1)
    pair = first[:, None] + jnp.arange(2)[None]
    share = jnp.take_along_axis(size, pair, axis=1)
    share /= jnp.maximum(jnp.sum(share, axis=1, keepdims=True), 1.0)
    second = jnp.where(full, pair[:, 1], self.slots)[:, None]

    def merge(x, add):
      both = token_layout.take_tokens(x, pair)
      if not add:
        both *= share.reshape(share.shape + (1,) * (x.ndim - 2))
      merged = jnp.sum(both, axis=1, keepdims=True)
      return token_layout.put_rows(x, second, merged)

    linear = cached.memory.reads_linearly
    state = state._replace(
      memories=jax.tree.map(lambda x: merge(x, linear), state.memories),
      keys=merge(state.keys, cached.aggregate.pool == "sum"),
    )
    slot = jnp.arange(self.slots)[None]
    drop = full[:, None] & (slot == first[:, None])
    return to_front(state, (state.index >= 0) & ~drop)


def check_policy(policy: CachePolicy | None, segments: Segments) -> None:
  """Raises ValueError unless they go together."""
  if policy is None:
    return
  if not isinstance(policy, CachePolicy):
    raise ValueError(f"`policy` must be None or a CachePolicy: got {policy!r}.")
  if type(segments) is not Constant:
    raise ValueError(
      "`policy` must be None unless segments are Constant: got "
      f"{policy} with {segments}."
    )


def _check_two(slots):
  if slots < 2:
    raise ValueError(f"`slots` must be at least 2: got {slots}.")
