"""What a cached memory carries from one call to the next."""

from typing import NamedTuple

from memcache_jax.array_typing import Array, Float, Int, State
from memcache_jax.caching._levels import Levels


class CacheState(NamedTuple):
  """State of a `Cached` memory.

  Attributes:
    online: state of the memory of the running segment.
    pool: sum of the keys of the running segment.
    position: tokens in the running segment, below the segment length.
    memories: cached snapshots, leaves [b s n ...], oldest first.
    keys: pooled keys of the cached segments.
    index: number of each cached segment in its document; -1 for a free slot.
    count: segments completed in the running document. Where there are more
      than the slots suffice for, everything read is nan.
    levels: writers of longer blocks, with logarithmic segments.
  """

  online: State
  pool: Float[Array, "b n k"]
  position: Int[Array, " b"]
  memories: State
  keys: Float[Array, "b s n k"]
  index: Int[Array, "b s"]
  count: Int[Array, " b"]
  levels: Levels | None = None
