"""What a cached memory carries from one call to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float, Int, PyTree, State
from memcache_jax.caching._levels import Levels
from memcache_jax.caching._levels import empty as empty_levels


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
    use: weight with which each cached memory has been read, summed over tokens
      and averaged over heads; for a policy that asks for it.
    chosen: numbers of the cached segments that the running block of tokens
      reads, -1 for none; where blocks select together.
  """

  online: State
  pool: Float[Array, "b n k"]
  position: Int[Array, " b"]
  memories: State
  keys: Float[Array, "b s n k"]
  index: Int[Array, "b s"]
  count: Int[Array, " b"]
  levels: Levels | None = None
  use: Float[Array, "b s"] | None = None
  chosen: Int[Array, "b n r"] | None = None


def empty(cached, params, shape, batch: int, slots: int) -> CacheState:
  """`Cached.empty_state`."""
  online = cached.memory.init_state(params, shape, batch)
  snapshot = jax.eval_shape(cached.memory.snapshot, online)
  n, k, _ = shape
  pool = jnp.zeros((batch, n, k), jnp.float32)
  levels = cached.segments.levels(slots)
  counts_use = cached.policy is not None and cached.policy.counts_use
  choice = None
  if cached.aggregate.block > 1:
    choice = jnp.full((batch, n, cached.aggregate.max_selected), -1, jnp.int32)
  return CacheState(
    online=online,
    pool=pool,
    position=jnp.zeros((batch,), jnp.int32),
    memories=jax.tree.map(
      lambda x: jnp.zeros((batch, slots, *x.shape[1:]), x.dtype), snapshot
    ),
    keys=jnp.zeros((batch, slots, n, k), jnp.float32),
    index=jnp.full((batch, slots), -1, jnp.int32),
    count=jnp.zeros((batch,), jnp.int32),
    levels=empty_levels(online, pool, levels, cached.write_mode),
    use=jnp.zeros((batch, slots), jnp.float32) if counts_use else None,
    chosen=choice,
  )


def to_front(state: CacheState, keep: Bool[Array, "b s"]) -> CacheState:
  """Moves the kept memories of each row to its front, and frees the rest."""
  stored = (state.memories, state.keys, state.index, state.use)
  memories, keys, index, use = first_kept(stored, keep, keep.shape[1])
  return state._replace(memories=memories, keys=keys, index=index, use=use)


def first_kept(tree: PyTree, keep: Bool[Array, "b s"], slots: int) -> PyTree:
  """Moves the kept memories of each row to the front of `slots` places.

  There may be more places than memories: a cache of explicit segments has room
  for as many as flags could have ended. Free places hold 0, or -1 as integers.
  """
  order = jnp.argsort(~keep, axis=1, stable=True)[:, :slots]
  filled = jnp.arange(slots)[None] < jnp.sum(keep, axis=1)[:, None]

  def pick(x):
    flags = filled.reshape(filled.shape + (1,) * (x.ndim - 2))
    empty = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    missing = [(0, 0)] * x.ndim
    missing[1] = (0, slots - x.shape[1])
    x = jnp.pad(x, missing)
    return jnp.where(flags, x, jnp.full((), empty, x.dtype))

  return jax.tree.map(pick, token_layout.take_tokens(tree, order))
