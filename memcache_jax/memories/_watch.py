"""Watching a memory learn: its inner loss and the size of what it holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import sharding, token_layout
from memcache_jax.array_typing import Array, Float, Params
from memcache_jax.memories._base import Memory, Tokens


class Watched(NamedTuple):
  """What a memory did at every token; 0 where a token does not exist.

  Attributes:
    inner_loss: of the token, at the weights at which its gradient is taken;
      None where nothing is minimised.
    norm: of all parameters of the memory that the token was written to, after
      it: what `snapshot` returns, per head.
  """

  inner_loss: Float[Array, "b t n"] | None
  norm: Float[Array, "b t n"]


def watch(memory: Memory, params: Params, tokens: Tokens) -> Watched:
  """Writes a new sequence token by token, and reports on every token.

  A memory that diverges shows here first: its norm grows, or its inner loss
  is larger at the end of the sequence than at its beginning. For looking at a
  few sequences; `Memory.scan` is many times faster.

  Args:
    memory: any memory; of a cached one, that of the current segment.
    params: its parameters.
    tokens: what to write.

  Example:
    >>> import jax
    >>> from memcache_jax.memories import HeadShape, Titans, watch
    >>> from memcache_jax.testing import random_tokens
    >>> memory, shape = Titans(), HeadShape(2, 4, 4)
    >>> params = memory.init_params(jax.random.key(0), shape)
    >>> tokens = random_tokens(memory, shape, 1, 5)
    >>> watched = jax.jit(watch, static_argnums=0)(memory, params, tokens)
    >>> watched.inner_loss.shape, watched.norm.shape
    ((1, 5, 2), (1, 5, 2))
  """
  b, t = tokens.q.shape[:2]
  initial = memory.init_state(params, tokens.head_shape, b, max_length=t)
  initial = sharding.rows_like(initial, tokens.q)
  mask = jnp.ones((b, t), bool) if tokens.mask is None else tokens.mask
  starts = jnp.zeros_like(mask) if tokens.starts is None else tokens.starts
  arrays = (tokens.q, tokens.k, tokens.v, dict(tokens.gates))
  arrays = token_layout.zero_masked(arrays, mask)

  def advance(state, inputs):
    (q, k, v, gates), mask, starts = inputs
    state = token_layout.select_rows(starts & mask, initial, state)
    loss = memory.inner_loss(params, state, k, v, gates)
    one = jax.tree.map(lambda x: x[:, None], (q, k, v, gates, mask))
    state = memory.scan(params, state, Tokens(*one))[1]
    keep = lambda x: jnp.where(mask[:, None], x, 0.0)
    norm = _norm(memory.snapshot(state))
    return state, jax.tree.map(keep, Watched(loss, norm))

  inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (arrays, mask, starts))
  _, watched = jax.lax.scan(advance, initial, inputs)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), watched)


def _norm(snapshot):
  """The norm of all leaves [b n ...], per row and head."""
  squares = [
    jnp.sum(jnp.square(x.astype(jnp.float32)).reshape(*x.shape[:2], -1), -1)
    for x in jax.tree.leaves(snapshot)
  ]
  return jnp.sqrt(sum(squares))
