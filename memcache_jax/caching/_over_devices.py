"""Segments of one sequence on several devices.

Segments that are written independently of one another need nothing of each
other until they are read. So every device writes those it holds, all devices
exchange what is left of them (end states and pooled keys), and every device
reads for its own tokens. No token leaves its device.

The tokens are those of a new sequence without mask, in whole constant segments,
with documents that start where segments do, under a mesh with Explicit axes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.caching import _layout, _next_state, _router, _segment_scan
from memcache_jax.caching._next_state import Written
from memcache_jax.caching._segments import Constant
from memcache_jax.caching._weights import stored_memories, weigh_some
from memcache_jax.memories._base import (
  Tokens,
  param_axes,
  state_axes,
  token_axes,
)


def run(cached, params, state, tokens):
  """`Cached.scan` of tokens that are spread over devices.

  Raises:
    ValueError: for what cannot be done without moving tokens.
  """
  axis = sharding.spec_of(tokens.q)[1]
  _layout.check_room(cached, tokens)
  _check(cached, state, tokens, sharding.devices_along(axis))
  return sharding.over_devices(
    lambda tokens, params: _run_own(cached, params, tokens, axis),
    (tokens, params),
    (token_axes(tokens), param_axes(params)),
    (
      "b t n v",
      state_axes(cached, tokens.head_shape, tokens.q.shape[1]),
    ),
    letters="btn",
  )


def _check(cached, state, tokens, devices):
  length, t = cached.segments.length, tokens.q.shape[1]
  unaligned = tokens.max_unaligned_starts
  for right, what, got in (
    (
      type(cached.segments) is Constant,
      "`segments` must be Constant",
      cached.segments,
    ),
    (
      cached.write_mode == "independent",
      "`write_mode` must be 'independent'",
      cached.write_mode,
    ),
    (cached.policy is None, "`policy` must be None", cached.policy),
    (
      cached.aggregate.block == 1,
      "tokens must choose each for itself, `block=1`",
      cached.aggregate,
    ),
    (state is None, "`state` must be None", "one"),
    (tokens.mask is None, "`mask` must be None", "one"),
    (
      tokens.starts is None or unaligned == 0,
      "documents must start where segments do, max_unaligned_starts=0",
      unaligned,
    ),
    (
      t % (devices * length) == 0,
      f"each of {devices} devices must hold whole segments of {length}",
      f"{t} in all",
    ),
  ):
    if not right:
      raise ValueError(f"Of tokens spread over devices {what}: got {got}.")


def _run_own(cached, params, tokens, axis):
  """Writes and reads a device's own segments."""

  def everyone(tree):
    gather = lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True)
    return jax.tree.map(gather, tree)

  layout = _layout.lay_out(tokens, None, cached.segments)
  inner = Tokens(
    tokens.q, tokens.k, tokens.v, dict(tokens.gates), seeds=tokens.seeds
  )
  inner = layout.spread(inner)
  segments = _segment_scan.describe(cached, None, layout, inner.k)
  b, g = segments.index.shape
  fresh = layout.fresh
  fresh = jnp.zeros((b, g), bool) if fresh is None else fresh
  index, document = _segment_scan.number(everyone(fresh))
  first = jax.lax.axis_index(axis) * g
  own = lambda x: jax.lax.dynamic_slice_in_dim(x, first, g, axis=1)
  segments = segments._replace(index=own(index), document=own(document))

  y, start, ends, online = _segment_scan.write(
    cached, params, None, layout, inner
  )
  keys = _router.pooled(
    cached.aggregate, segments.total, segments.count[:, :, -1]
  )
  online = jax.tree.map(lambda x: x[:, None], online)
  ends, keys, online = everyone((ends, keys, online))
  online = jax.tree.map(lambda x: x[:, -1], online)
  # Named behind the exchange: what is kept need not be sent again.
  written = _next_state.keep_ends(Written(ends, keys, online, None))

  # Of all segments; what there is of every token stays where it is.
  every = segments._replace(
    count=segments.count[:, :, -1:], running=None, index=None, document=None
  )
  every = everyone(every)._replace(index=index, document=document)
  stored = stored_memories(None, written, every)
  weighed = weigh_some(cached, None, stored, segments, inner, first)
  y = _segment_scan.read(
    cached, params, layout, inner, stored, weighed, y, start
  )
  blocks = index.shape[1]
  lost = layout.lost
  if lost is not None:
    lost = jax.lax.pmax(lost.astype(jnp.int32), axis) > 0
  layout = dataclasses.replace(layout, lost=lost)
  slots = cached.capacity(blocks * layout.length)
  beyond = _router.beyond(cached, segments.index, slots)
  y = jnp.where(beyond[:, :, None, None, None], jnp.nan, y)
  y = layout.collect(y.astype(tokens.v.dtype))
  layout = dataclasses.replace(
    layout, tokens=blocks * layout.length, last=blocks - 1
  )
  state = _next_state.advance(
    cached, params, None, tokens, layout, every, written
  )
  return y, state
