"""Segments of a call one after another, for policies that look at memories."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.caching import _layout, _next_state, _one_segment
from memcache_jax.memories._base import Tokens


def run(cached, params, state, tokens):
  """Writes and reads many tokens; returns y, state and weights."""
  layout = _layout.lay_out(tokens, state, cached.segments)
  b = tokens.q.shape[0]
  if state is None:
    shape = tokens.head_shape
    state = cached.empty_state(params, shape, b, cached.policy.slots)
    state = sharding.rows_like(state, tokens.q)
  inner = Tokens(
    tokens.q, tokens.k, tokens.v, dict(tokens.gates), seeds=tokens.seeds
  )
  inner = layout.spread(inner)
  g, c = inner.q.shape[1:3]
  valid, fresh = layout.valid, layout.fresh
  if valid is None:
    valid = jnp.ones((b, g, c), bool)
  if fresh is None:
    fresh = jnp.zeros((b, g), bool)
  # Not an update of zeros, which on a mesh would have another sharding.
  starts = fresh[:, :, None] & (jnp.arange(c) == 0)[None, None]

  # The backward pass computes a segment anew, from the state before it.
  @jax.checkpoint
  def segment(state, tokens):
    y, state, weights = _one_segment.run(cached, params, state, tokens)
    return state, (y, weights)

  inner = replace(inner, mask=valid, starts=starts)
  inner = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inner)
  state, outputs = jax.lax.scan(segment, state, inner)
  outputs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
  y, weights = layout.collect(outputs)
  if layout.lost is not None:
    state = _next_state.poison(state, layout.lost)
  return y, state, weights
