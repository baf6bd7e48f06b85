"""Where a sequence is cut, and how many memories that leaves to keep."""

from dataclasses import dataclass

from memcache_jax.ops import _checks


@dataclass(frozen=True)
class Constant:
  """Segments of one length, counted from the start of each document.

  Memory Caching (arXiv 2602.24281), section 3.1. A trailing partial segment
  is simply an online memory that is never cached.

  Attributes:
    length: tokens per segment; it defines the model.
  """

  length: int = 256

  def __post_init__(self):
    _checks.check_positive(length=self.length)

  def capacity(self, max_length: int) -> int:
    """Memories cached over a document of `max_length` tokens."""
    return max_length // self.length

  def blocks(self, tokens: int, unaligned_starts: int) -> int:
    """Segments that `tokens` tokens of a running stream can touch."""
    return -(-(tokens + self.length - 1) // self.length) + unaligned_starts
