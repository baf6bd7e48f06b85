"""What tokens may read of the memories stored before them, and how much."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int, State
from memcache_jax.caching import _blocks, _next_state, _router
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
  chosen: Int[Array, "*rows r"] | None  # where few are read
  selection: Selection | None  # where reading only these is faster


def weigh(
  cached, state, stored, segments, tokens, first: int | Int[Array, ""] = 0
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
  relevance = _router.route(
    aggregate,
    flat,
    stored.keys,
    own_key,
    stored.index,
    own_index.reshape(b, g * c),
  )
  unfold = lambda x: x.reshape(b, g, c, *x.shape[2:])
  relevance = jax.tree.map(unfold, relevance)

  def share(choose, *inputs):
    return _blocks.share_places(
      aggregate.block, choose, inputs, state, segments
    )

  weighed = mix(aggregate, relevance, readable[:, :, None, None], share)
  return weighed._replace(
    weights=jnp.broadcast_to(weighed.weights, shape),
    own=jnp.broadcast_to(weighed.own, shape[:-1]),
  )


def mix(aggregate, relevance, readable, share) -> Weighed:
  """What the aggregator makes of relevance.

  Args:
    aggregate: the aggregator.
    relevance: of what is cached, and of the online memory.
    readable: which cached memories a token may read.
    share: calls what chooses by scores and `readable`, and lets the tokens of
      a block share what it returns.
  """
  logits, own_logit, scores = relevance
  if aggregate.max_selected is None:
    weights, own = aggregate.weights(logits, own_logit, readable)
    return Weighed(weights, own, None, None)
  if aggregate.block > 1:
    index = share(aggregate.choose, scores, readable)
  else:
    index = aggregate.choose(scores, readable)
  selection = aggregate.gate_chosen(index, logits, own_logit, readable, scores)
  slots = readable.shape[-1]
  return Weighed(
    selection.all_weights(slots),
    selection.own,
    index,
    selection if selects(aggregate, slots) else None,
  )


def last_choice(cached, layout, segments, stored, chosen):
  """What a state carries of choices [b g c n r]: those of the last tokens."""
  if cached.aggregate.block == 1:
    return None
  b, g = segments.index.shape
  last = layout.last
  if isinstance(last, int):
    last = jnp.full((b,), last)
  at_end = lambda x, i: _next_state.take_block(x, i)
  count = at_end(segments.count[:, :, -1], last)
  chosen = at_end(at_end(chosen, last), jnp.maximum(count - 1, 0))
  return _blocks.numbers(chosen, stored.index, cached.aggregate.max_selected)


def selects(aggregate, slots: int) -> bool:
  """Whether only what tokens select is read, of so many stored memories."""
  count = aggregate.max_selected
  return count is not None and slots >= _SLOTS_PER_SELECTED * count
