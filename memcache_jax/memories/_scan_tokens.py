"""The definition of `Memory.scan`, and the default: one token at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from memcache_jax import sharding, token_layout
from memcache_jax.array_typing import Array, Float, Params, State
from memcache_jax.memories._own import check_own
from memcache_jax.memories._tokens import Tokens, check_tokens


def scan_tokens(
  memory: Any,
  params: Params,
  state: State | None,
  tokens: Tokens,
  read: Callable[..., Float[Array, "b 1 n v"]] | None = None,
) -> tuple[Float[Array, "b t n v"], State]:
  """The definition of `Memory.scan`: one token at a time.

  Args:
    memory: the memory.
    params: its parameters.
    state: what to start from, or None for a new sequence.
    tokens: what to write and read.
    read: how token number `index` reads, given (state, q, index); None reads
      the online memory.

  Returns:
    y in the dtype of v, and the state after the last token.

  Raises:
    ValueError: when tokens, the state and what the memory defines do not fit
      together.
  """
  check_tokens(memory, tokens)
  b, t = tokens.q.shape[:2]
  initial = memory.init_state(params, tokens.head_shape, b, max_length=t)
  initial = sharding.rows_like(initial, tokens.q)
  state = initial if state is None else state
  mask = jnp.ones((b, t), bool) if tokens.mask is None else tokens.mask
  starts = jnp.zeros_like(mask) if tokens.starts is None else tokens.starts
  q, k, v, gates = token_layout.zero_masked(
    (tokens.q, tokens.k, tokens.v, dict(tokens.gates)), mask
  )

  def read_online(state, q, index):
    del index
    return memory.read(params, memory.snapshot(state), q)

  check_own(memory, params, initial, state, q, k, v, gates)
  read = read_online if read is None else read

  def advance(state, inputs):
    q, k, v, gates, mask, starts, index = inputs
    state = token_layout.select_rows(starts & mask, initial, state)
    new = memory.step(params, state, k, v, gates)
    state = token_layout.select_rows(mask, new, state)
    y = read(state, q[:, None], index)[:, 0]
    return state, jnp.where(mask[:, None, None], y, 0).astype(v.dtype)

  inputs = (q, k, v, gates, mask, starts)
  inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
  state, y = jax.lax.scan(advance, state, (*inputs, jnp.arange(t)))
  return jnp.moveaxis(y, 0, 1), state
