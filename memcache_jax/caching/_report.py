"""Watching what tokens select, and a loss that spreads it."""

from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float
from memcache_jax.caching import (
  _layout,
  _ranks,
  _router,
  _segment_scan,
  _weights,
)
from memcache_jax.caching._cached import Cached
from memcache_jax.caching._next_state import Written
from memcache_jax.caching._segments import Logarithmic
from memcache_jax.caching._sparse_selective import SparseSelective
from memcache_jax.memories._base import Memory, Tokens, check_tokens


class SelectionReport(NamedTuple):
  r"""What the router of sparse selective caching did with some tokens.

  All is about tokens with a choice: that can read more than `top_k` cached
  memories. Let :math:`a_{t,i}` say that token t is one and can read memory i of
  its document, one of :math:`N_t`; :math:`r_{t,i}` that it selects it; and
  :math:`p_t` be the softmax of relevance over what it can read. Sums are over
  the tokens of one row and head.

  Attributes:
    share: of the tokens that can read a memory, how many select it,
      :math:`\sum_t r_{t,i} / \sum_t a_{t,i}`; 0 where there are none. The
      cached memories of the call are in order, but for the last segment.
    load: how many select it, over how many would if each chose alike among all
      it can read, :math:`l_i = \sum_t r_{t,i} / \sum_t a_{t,i} k / N_t`.
    entropy: of :math:`p_t` in nats, mean over tokens and heads.
    overlap: of what a token selects, the share that the token before it in its
      segment selects too, mean over tokens and heads. 1: a block of tokens
      would lose nothing.
    balance: :math:`\sum_i l_i \sum_t a_{t,i} p_{t,i}` summed over
      rows and heads, over their number of tokens: a loss, 1 where all is
      selected alike.
      For tokens that can all read the same it is that of Switch Transformers
      (arXiv 2101.03961, Eq. 4), :math:`N \sum_i f_i P_i`. As there, loads have
      no gradient. 0 without a choice.
  """

  share: Float[Array, "b n s"]
  load: Float[Array, "b n s"]
  entropy: Float[Array, ""]
  overlap: Float[Array, ""]
  balance: Float[Array, ""]


def watch_selection(memory: Memory, tokens: Tokens) -> SelectionReport:
  """What the tokens of new sequences select.

  It takes keys and what routes, and writes and reads nothing. In one program
  with the layer's own call the two share their work.

  Args:
    memory: a `Cached` one with `SparseSelective`, and segments that are not
      merged or dropped.
    tokens: of it. Where noise is drawn, that of their `seeds`.

  Raises:
    ValueError: for any other memory.

  Example:
    >>> import jax
    >>> from memcache_jax.caching import Cached, Constant, SparseSelective
    >>> from memcache_jax.caching import watch_selection
    >>> from memcache_jax.memories import HeadShape, Linear
    >>> from memcache_jax.testing import random_tokens
    >>> memory = Cached(Linear(), Constant(4), SparseSelective(2))
    >>> tokens = random_tokens(memory, HeadShape(2, 8, 8), 1, 40)
    >>> watch = jax.jit(watch_selection, static_argnums=0)
    >>> watch(memory, tokens).load.shape
    (1, 2, 9)
  """
  if not watches_selection(memory):
    raise ValueError(
      "`memory` must be Cached, with SparseSelective, Constant or Explicit "
      f"segments and no policy: got {memory}."
    )
  check_tokens(memory, tokens)
  layout = _layout.lay_out(tokens, None, memory.segments)
  inner = layout.spread(
    Tokens(tokens.q, tokens.k, tokens.v, tokens.gates, seeds=tokens.seeds)
  )
  segments = _segment_scan.describe(memory, None, layout, inner.k)
  keys = _router.pooled(
    memory.aggregate, segments.total, segments.count[:, :, -1]
  )
  written = Written(None, keys, None, None)
  stored = _weights.stored_memories(None, written, segments)
  relevance, readable = _weights.relate(memory, stored, segments, inner)
  weighed = _weights.weigh(memory, None, stored, segments, inner)
  valid = layout.valid
  if valid is None:
    valid = jnp.ones(inner.q.shape[:3], bool)
  assert weighed.selection is not None
  chosen = _ranks.among(readable.shape[-1], weighed.selection.index)
  return _report(
    memory.aggregate.max_selected, relevance.logits, readable, chosen, valid
  )


def watches_selection(memory: Any) -> TypeGuard[Cached]:
  """Whether `watch_selection` takes it."""
  return (
    isinstance(memory, Cached)
    and isinstance(memory.aggregate, SparseSelective)
    and not isinstance(memory.segments, Logarithmic)
    and memory.policy is None
  )


def _report(top_k, logits, readable, chosen, valid) -> SelectionReport:
  """Of logits and choices [b g c n s], of tokens [b g c] that exist."""
  count = jnp.sum(readable, axis=-1, keepdims=True)
  able = readable & (count > top_k) & valid[..., None, None]
  able = jnp.broadcast_to(able, logits.shape)
  chosen = (chosen & able).astype(jnp.float32)
  low = jnp.finfo(jnp.float32).min
  log_p = jax.nn.log_softmax(jnp.where(readable, logits, low), axis=-1)
  p = jnp.where(able, jnp.exp(log_p), 0.0)
  uniform = top_k / jnp.maximum(count, 1).astype(jnp.float32)
  over_tokens = lambda x: jnp.sum(x, axis=(1, 2), dtype=jnp.float32)
  selected = over_tokens(chosen)
  load = _divide(selected, over_tokens(jnp.where(able, uniform, 0.0)))
  tokens = jnp.sum(jnp.any(able, axis=-1), dtype=jnp.float32)
  entropy = -jnp.sum(jnp.where(able, p * log_p, 0.0))
  pairs = jnp.sum(chosen[:, :, 1:])  # of a token and a memory, not the first
  same = jnp.sum(chosen[:, :, 1:] * chosen[:, :, :-1])
  return SelectionReport(
    share=_divide(selected, over_tokens(able)),
    load=load,
    entropy=_divide(entropy, tokens),
    overlap=_divide(same, pairs),
    balance=_divide(jnp.sum(load * over_tokens(p)), tokens),
  )


def _divide(x, y):
  """0 where there is nothing to divide by."""
  return x / jnp.where(y > 0, y, 1.0)
