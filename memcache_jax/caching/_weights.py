"""What tokens may read of the memories stored before them, and how much."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int, State
from memcache_jax.caching import _blocks, _next_state, _ranks, _router
from memcache_jax.caching._aggregators import Selection

# Reading only selected memories takes sorting and moving tokens, and is faster
# from this many stored memories per selected one on; measured on a CPU, where
# a read of all of them takes time in proportion to how many they are. For a TPU
# its compiler estimates much the same of the XLA forms, gradients included: to
# read 2 of 15 networks takes twice as long as to read all 15, in bands.
_SLOTS_PER_SELECTED = 12

# Tokens of a call only read memories of earlier segments. The segments are cut
# into up to 4 bands, each reading no further than its own last segment: that
# saves 3 of every 8 reads, and the program stays of one size. Every band takes
# time to compile, which a band of fewer segments is not worth.
_BANDS = 4
_SEGMENTS_PER_BAND = 4


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
  selection: Selection | None  # where few are read


def bands(blocks: int) -> list[tuple[int, int]]:
  """First and last segment, which is not included, of every band."""
  count = max(1, min(_BANDS, blocks // _SEGMENTS_PER_BAND))
  edges = [round(i * blocks / count) for i in range(count + 1)]
  return list(zip(edges[:-1], edges[1:], strict=True))


def weigh(cached, state, stored, segments, tokens) -> Weighed:
  """Weights [b g c n s] of the stored memories and [b g c n] of the own."""
  aggregate = cached.aggregate
  slots, g = stored.index.shape[1], tokens.q.shape[1]
  if not selects(aggregate, slots):
    return weigh_some(cached, state, stored, segments, tokens)
  related, chosen = [], []
  for first, last in bands(g):
    cut = lambda x, first=first, last=last: x[:, first:last]
    some = jax.tree.map(lambda x, s=slots - g + last: x[:, :s], stored)
    facts, band = jax.tree.map(cut, (segments, tokens))
    relevance, readable = relate(cached, some, facts, band, first)
    # With the open segment of a state goes on nothing but the first one.
    share = _sharing(aggregate, state if first == 0 else None, facts)
    index = choose(aggregate, relevance.scores, readable, share)
    related.append((relevance.scores, readable))
    chosen.append((index, _ranks.at(relevance.logits, index)))
  join = lambda *x: jnp.concatenate(x, axis=1)
  index, logits = jax.tree.map(join, *chosen)
  # Of all bands together; what is not used of it is not computed.
  own = relate(cached, stored, segments, tokens)[0].own
  if aggregate.router in ("context", "shared"):
    logits = _router.at_chosen(aggregate, tokens, stored.keys, logits, index)
  parts = []
  for edges, (scores, readable) in zip(bands(g), related, strict=True):
    cut = lambda x, edges=edges: x[:, slice(*edges)]
    inputs = (cut(index), cut(logits), cut(own), readable, scores)
    weighed = _gate(aggregate, *inputs)
    parts.append(_for_all_slots(weighed, slots))
  return jax.tree.map(join, *parts)


def _for_all_slots(weighed, slots):
  """With weights of 0 for the memories that a band cannot read."""
  missing = [(0, 0)] * 4 + [(0, slots - weighed.weights.shape[-1])]
  pad = lambda x: jnp.pad(x, missing)
  selection = weighed.selection
  others = jax.tree.map(pad, selection.others)
  return weighed._replace(
    weights=pad(weighed.weights), selection=selection._replace(others=others)
  )


def relate(
  cached, stored, segments, tokens, first: int | Int[Array, ""] = 0
) -> tuple[_router.Relevance, Array]:
  """Relevance [b g c n ...] of memories, and which are readable [b g 1 1 s]."""
  aggregate = cached.aggregate
  b, g, c, n, _ = tokens.q.shape
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
  return relevance, readable[:, :, None, None]


def weigh_some(
  cached, state, stored, segments, tokens, first: int | Int[Array, ""] = 0
) -> Weighed:
  """`weigh` of segments of which the first is not the call's first, but this.

  Their facts, and the tokens, are of these segments alone.
  """
  aggregate = cached.aggregate
  shape = (*tokens.q.shape[:4], stored.block.shape[1])
  relevance, readable = relate(cached, stored, segments, tokens, first)
  share = _sharing(aggregate, state, segments)
  weighed = mix(aggregate, relevance, readable, share)
  return weighed._replace(
    weights=jnp.broadcast_to(weighed.weights, shape),
    own=jnp.broadcast_to(weighed.own, shape[:-1]),
  )


def _sharing(aggregate, state, segments):
  """Lets tokens by segments share what is chosen, see `choose`."""
  return lambda choose, *inputs: _blocks.share_places(
    aggregate.block, choose, inputs, state, segments
  )


def mix(aggregate, relevance, readable, share) -> Weighed:
  """What the aggregator makes of relevance.

  Args:
    aggregate: the aggregator.
    relevance: of what is cached, and of the online memory.
    readable: which cached memories a token may read.
    share: see `choose`.
  """
  logits, own_logit, scores = relevance
  if aggregate.max_selected is None:
    weights, own = aggregate.weights(logits, own_logit, readable)
    return Weighed(weights, own, None)
  index = choose(aggregate, scores, readable, share)
  chosen = _ranks.at(logits, index)
  return _gate(aggregate, index, chosen, own_logit, readable, scores)


def choose(aggregate, scores, readable, share) -> Int[Array, "*rows r"]:
  """The memories that each token reads.

  Args:
    aggregate: the aggregator.
    scores: relevance that it chooses by.
    readable: which cached memories a token may read.
    share: calls what chooses by scores and `readable`, and lets the tokens of
      a block share what it returns.
  """
  if aggregate.block > 1:
    return share(aggregate.choose, scores, readable)
  return aggregate.choose(scores, readable)


def _gate(aggregate, index, logits, own_logit, readable, scores) -> Weighed:
  selection = aggregate.gate_chosen(index, logits, own_logit, readable, scores)
  weights = selection.all_weights(readable.shape[-1])
  return Weighed(weights, selection.own, selection)


def last_choice(cached, layout, segments, stored, selection):
  """What a state carries of selections [b g c n r]: those of last tokens."""
  if cached.aggregate.block == 1:
    return None
  b, g = segments.index.shape
  last = layout.last
  if isinstance(last, int):
    last = jnp.full((b,), last)
  at_end = lambda x, i: _next_state.take_block(x, i)
  count = at_end(segments.count[:, :, -1], last)
  chosen = at_end(at_end(selection.index, last), jnp.maximum(count - 1, 0))
  return _blocks.numbers(chosen, stored.index, cached.aggregate.max_selected)


def selects(aggregate, slots: int) -> bool:
  """Whether reading only what tokens select, of so many, is faster."""
  count = aggregate.max_selected
  return count is not None and slots >= _SLOTS_PER_SELECTED * count
