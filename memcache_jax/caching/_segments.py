"""Where a sequence is cut, and which memories a later token can read.

Segments of a document are numbered from 0. A cached memory goes by the number
of the segment it ends with; a token of segment n has n complete segments
before it.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Int
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class Segments:
  """Base of the ways to cut a document into segments.

  Attributes:
    length: tokens per segment, counted from the start of each document; it
      defines the model. A trailing partial segment is never cached.
  """

  length: int = 256

  def __post_init__(self):
    _checks.check_positive(length=self.length)

  @property
  def max_flagged(self) -> int:
    """Segments of a document that a flagged token may end."""
    return 0

  def capacity(self, max_length: int) -> int:
    """Memories to keep over a document of `max_length` tokens."""
    raise NotImplementedError

  def limit(self, slots: int) -> int:
    """Segments of a document that `slots` memories suffice for."""
    raise NotImplementedError

  def levels(self, slots: int) -> int:
    """Sizes of cached memories, other than one segment."""
    raise NotImplementedError

  def readable(
    self, n: Int[Array, "*#rows"], stored: Int[Array, "*#rows"]
  ) -> Bool[Array, "*#rows"]:
    """Whether tokens of segment `n` read the memory cached after `stored`."""
    raise NotImplementedError

  def blocks(self, tokens: int, unaligned_starts: int) -> int:
    """Segments that `tokens` tokens of a running stream can touch."""
    return -(-(tokens + self.length - 1) // self.length) + unaligned_starts


@dataclass(frozen=True)
class Constant(Segments):
  """One memory per segment; tokens read all earlier ones.

  Memory Caching (arXiv 2602.24281), section 3.1.
  """

  def capacity(self, max_length: int) -> int:
    return max_length // self.length

  def limit(self, slots: int) -> int:
    return slots + 1

  def levels(self, slots: int) -> int:
    del slots
    return 0

  def readable(
    self, n: Int[Array, "*#rows"], stored: Int[Array, "*#rows"]
  ) -> Bool[Array, "*#rows"]:
    return (stored >= 0) & (stored < n)


@dataclass(frozen=True)
class Explicit(Constant):
  """Segments that end where the user says: sentences, turns, paragraphs.

  A segment ends at a token that `segment_ends` flags, or after `length` tokens
  at the latest. That it is complete is known at its last token, so a stream
  never looks ahead. As with constant segments one memory is kept for each, and
  the cache has room for `max_segments` of a document. What comes after the
  segment that follows them is nan, and flags mean nothing there.

  A call lays its tokens out in rows of `length`, one row more for each flag,
  `max_segments + 1` of them at most: choose a length not far above that of a
  usual segment. Where several documents in one row of a call have more flags
  than that together, the row becomes nan.

  Attributes:
    length: most tokens of a segment.
    max_segments: memories of a document that the cache has room for.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.caching import Cached, Explicit
    >>> from memcache_jax.layers import MemoryMixer
    >>> from memcache_jax.memories import Linear
    >>> memory = Cached(Linear(), Explicit(length=32, max_segments=8))
    >>> mixer = MemoryMixer(16, 2, memory, rngs=nnx.Rngs(0))
    >>> ends = jnp.array([[0, 0, 1, 0, 0, 0, 1, 0]], bool)
    >>> run = jax.jit(MemoryMixer.__call__)
    >>> _, state = run(mixer, jnp.ones((1, 8, 16)), segment_ends=ends)
    >>> state.memory.count.item(), state.memory.position.item()
    (2, 1)
  """

  max_segments: int = 64

  def __post_init__(self):
    super().__post_init__()
    _checks.check_positive(max_segments=self.max_segments)

  @property
  def max_flagged(self) -> int:
    return self.max_segments + 1

  def capacity(self, max_length: int) -> int:
    return min(self.max_segments, max_length)


@dataclass(frozen=True)
class Logarithmic(Segments):
  """Memories of 1, 2, 4, ... segments; tokens read one per set bit of n.

  The n complete segments before a token are covered by blocks as the binary
  digits of n say, largest and oldest first: 5 segments are read as blocks of
  4 and 1. When two blocks of one size meet they give way to one of twice the
  size, like the carry of a binary counter (a Fenwick tree), so that a document
  of N segments needs about log2 N memories. Memory Caching (arXiv 2602.24281),
  section 3.1, per token as in its Figure 3.

  With independent segments the memory of a block is one that read the whole
  block, from the initial memory: one writer per block size runs along. With
  checkpoints it is the running memory at the end of the block.
  """

  def capacity(self, max_length: int) -> int:
    return (max_length // self.length).bit_length()

  def limit(self, slots: int) -> int:
    return 1 << slots

  def levels(self, slots: int) -> int:
    return max(slots - 1, 0)

  def readable(
    self, n: Int[Array, "*#rows"], stored: Int[Array, "*#rows"]
  ) -> Bool[Array, "*#rows"]:
    # The block that ends with segment e - 1 has as many segments as the lowest
    # set bit of e says, and is in use until the next block of that size ends.
    end = stored + 1
    size = jnp.maximum(end & -end, 1)
    return (stored >= 0) & (n - n % size == end)


def block_level(stored: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
  """log2 of the segments in the block that ends with segment `stored`."""
  end = stored + 1
  size = jnp.maximum(end & -end, 1)
  return jnp.bitwise_count(size - 1).astype(jnp.int32)
