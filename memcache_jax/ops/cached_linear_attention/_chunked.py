"""Cached linear attention of ops that exist: write segments, read states."""

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops.cache_read import cache_read
from memcache_jax.ops.cached_linear_attention._inputs import (
  Cut,
  Inputs,
  fresh_segments,
  readable,
  split,
)
from memcache_jax.ops.linear_attention import (
  LinearAttentionState,
  linear_attention,
)

# Tokens of a call only read states of earlier segments. The segments are cut
# into this many bands, each reading no further than its own last segment:
# 4 bands save 3 of every 8 reads, and the program stays of one size.
_BANDS = 4


def cached_linear_attention(
  inputs: Inputs,
  fresh: Bool[Array, "b g"] | None,
  cut: Cut,
  chunk_size: int,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b g n k v"]]:
  """`cached_linear_attention`, chunk-parallel."""
  t = inputs.q.shape[1]
  q, k, v, own_weight = [
    split(x, cut) for x in (inputs.q, inputs.k, inputs.v, inputs.own_weight)
  ]
  log_decay, write = [
    x if x is None else split(x, cut) for x in (inputs.log_decay, inputs.write)
  ]
  online, ends = _write(
    q, k, v, log_decay, write, inputs.state, fresh, cut, chunk_size
  )
  y = own_weight.astype(jnp.float32)[..., None] * online.astype(jnp.float32)
  y += _read(inputs, q, ends, cut)
  y = rearrange(y, "b g c n v -> b (g c) n v")[:, :t]
  return y.astype(inputs.v.dtype), ends


def _write(q, k, v, log_decay, write, state, fresh, cut, chunk_size):
  """Reads of the online memory and end states of all segments."""
  b, g = q.shape[:2]
  write = None if write is None else write[..., None]

  def run(state, q, k, v, log_decay, write):
    state = None if state is None else LinearAttentionState(state)
    y, state = linear_attention(
      q,
      k,
      v,
      log_decay=log_decay,
      write=write,
      state=state,
      chunk_size=chunk_size,
      implementation="xla",
    )
    return y, state.matrix

  tokens = (q, k, v, log_decay, write)
  if cut.write_mode == "independent":
    if state is not None:
      if fresh is not None:
        state = jnp.where(fresh[:, 0, None, None, None], 0.0, state)
      state = jnp.pad(state[:, None], [(0, 0), (0, g - 1)] + [(0, 0)] * 3)
    y, ends = run(*_fold((state, *tokens)))
    return _unfold(y, g), _unfold(ends, g)

  def step(state, inputs):
    fresh, tokens = inputs
    state = jnp.where(fresh[:, None, None, None], 0.0, state)
    y, state = run(state, *tokens)
    return state, (y, state)

  if state is None:
    state = linear_attention(q[:, 0, :0], k[:, 0, :0], v[:, 0, :0])[1].matrix
  fresh = fresh_segments(fresh, cut, b).T
  inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
  outputs = jax.lax.scan(step, state, (fresh, inputs))[1]
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)


def _read(inputs, q, ends, cut):
  """Reads of stored states, a band of segments at a time."""
  g = cut.segments
  weights = split(readable(inputs.weights, cut), cut)
  stored = ends[:, :-1]
  if inputs.memories is not None:
    stored = jnp.concatenate([inputs.memories, stored], axis=1)
  bands = min(_BANDS, g)
  edges = [round(i * g / bands) for i in range(bands + 1)]
  parts = []
  for first, last in zip(edges[:-1], edges[1:], strict=True):
    slots = cut.carried + last - 1
    y = cache_read(
      rearrange(q[:, first:last], "b g c n k -> b (g c) n k"),
      stored[:, :slots],
      rearrange(
        weights[:, first:last, ..., :slots], "b g c n s -> b (g c) n s"
      ),
      implementation="xla",
    )
    parts.append(rearrange(y, "b (g c) n v -> b g c n v", c=cut.length))
  return jnp.concatenate(parts, axis=1)


def _fold(tree):
  return jax.tree.map(lambda x: rearrange(x, "b g ... -> (b g) ..."), tree)


def _unfold(x, g):
  return rearrange(x, "(b g) ... -> b g ...", g=g)
