"""What tokens may read of the memories stored before them, and how much."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int, State
from memcache_jax.caching import _router
from memcache_jax.caching._aggregators import Selection

# Reading only selected memories takes sorting and moving tokens, and is faster
# from this many stored memories per selected one on; measured on a CPU, where
# a read of all of them takes time in proportion to how many they are.
_SLOTS_PER_SELECTED = 12


class Stored(NamedTuple):
  """Memories that tokens of this call may read: carried and new ones."""

  memories: State
  keys: Float[Array, "b s n k"]
  index: Int[Array, "b s"]
  document: Int[Array, "b s"]
  block: Int[Array, "1 s"]  # readable in later blocks only; -1: carried


def stored_memories(state, written, segments) -> Stored:
  # Nothing of this call comes after its last segment, so that one is left out.
  g = written.keys.shape[1]
  new = Stored(
    written.memories,
    written.keys,
    segments.index,
    segments.document,
    jnp.arange(g)[None],
  )
  new = jax.tree.map(lambda x: x[:, :-1], new)
  if state is None:
    return new
  slots = state.index.shape[1]
  old = Stored(
    state.memories,
    state.keys,
    state.index,
    jnp.where(state.index >= 0, 0, -1),
    jnp.full((1, slots), -1),
  )
  return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)


class Weighed(NamedTuple):
  """With which weight tokens read which memory."""

  weights: Float[Array, "*rows s"]
  own: Float[Array, "*rows"]
  selection: Selection | None  # where reading only these is faster


def weigh(
  cached, stored, segments, tokens, first: int | Int[Array, ""] = 0
) -> Weighed:
  """Weights [b g c n s] of the stored memories and [b g c n] of the own.

  `first` is the number in the call of the first of these segments.
  """
  aggregate = cached.aggregate
  b, g, c, n, _ = tokens.q.shape
  shape = (b, g, c, n, stored.block.shape[1])
  readable = segments.document[:, :, None] == stored.document[:, None]
  block = first + jnp.arange(g)[None]
  readable &= stored.block[:, None] < block[:, :, None]
  readable &= cached.readable(segments.index[:, :, None], stored.index[:, None])
  flat = jax.tree.map(lambda x: x.reshape(b, g * c, *x.shape[3:]), tokens)
  own_key = None
  if aggregate.router in ("context", "shared"):
    own_key = _router.pooled(aggregate, segments.running, segments.count)
    own_key = own_key.reshape(b, g * c, n, -1)
  own_index = jnp.broadcast_to(segments.index[:, :, None], (b, g, c))
  logits, own_logit = _router.route(
    aggregate,
    flat,
    stored.keys,
    own_key,
    stored.index,
    own_index.reshape(b, g * c),
  )
  if logits is not None and own_logit is not None:
    logits, own_logit = logits.reshape(shape), own_logit.reshape(shape[:-1])
  weighed = mix(aggregate, logits, own_logit, readable[:, :, None, None])
  return weighed._replace(
    weights=jnp.broadcast_to(weighed.weights, shape),
    own=jnp.broadcast_to(weighed.own, shape[:-1]),
  )


def mix(aggregate, logits, own_logit, readable) -> Weighed:
  """What the aggregator makes of relevance."""
  selection = aggregate.select(logits, own_logit, readable)
  if selection is not None and not _pays(selection, readable.shape[-1]):
    selection = None
  weights, own = aggregate.weights(logits, own_logit, readable)
  return Weighed(weights, own, selection)


def _pays(selection, slots) -> bool:
  return slots >= _SLOTS_PER_SELECTED * max(selection.index.shape[-1], 1)
