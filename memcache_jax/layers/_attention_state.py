"""The state of attention: what it keeps of the tokens before."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Float, Int
from memcache_jax.layers._softmax_attention import Keys


class AttentionState(NamedTuple):
  """Keys and values of the running document, in compute dtype.

  Attributes:
    keys: already rotated. Position p lies at place p, or in a window at
      place p modulo the window.
    values: like keys.
    length: tokens of the running document.
    tails: last inputs of the short convolutions of q, k and v, if any.
  """

  keys: Float[Array, "b m n k"]
  values: Float[Array, "b m n k"]
  length: Int[Array, " b"]
  tails: tuple[Float[Array, "b w_less_1 n k"], ...] | None = None


def stored(
  state: AttentionState,
  window: int | None,
  current: Int[Array, "b 1"] | None = None,
) -> Keys:
  """What a state holds, as keys of document 0, or of the `current` one."""
  b, room = state.keys.shape[:2]
  place = jnp.arange(room, dtype=jnp.int32)[None]
  length = state.length[:, None]
  if window is None:
    position = jnp.broadcast_to(place, (b, room))
    filled = place < length
  else:
    # The last position that lies at this place.
    position = length - 1 - (length - 1 - place) % room
    filled = position >= 0
  document = jnp.where(filled, 0 if current is None else current, -1)
  return Keys(state.keys, state.values, position, document)


def write(
  own: Keys,
  state: AttentionState | None,
  window: int | None,
  *,
  has_starts: bool,
) -> AttentionState:
  """The state after the tokens of this call."""
  b, t, n, k = own.k.shape
  real = own.document >= 0
  document = jnp.max(own.document, axis=1, initial=0)
  last = real & (own.document == document[:, None])
  length = jnp.zeros((b,), jnp.int32) if state is None else state.length
  length = jnp.where(document > 0, 0, length)
  ends = jnp.max(jnp.where(last, own.position + 1, 0), axis=1, initial=0)
  length = jnp.maximum(length, ends)
  if state is None:
    room = t if window is None else window
    zeros = jnp.pad(own.k[:, :0], [(0, 0), (0, room), (0, 0), (0, 0)])
    keys, values = zeros, zeros
  else:
    keys, values = state.keys, state.values
    room = keys.shape[1]
  if has_starts and state is not None:
    # Nothing of an earlier document may stay, not even a nan.
    keys, values = jax.tree.map(
      lambda x: jnp.where((document > 0)[:, None, None, None], 0, x),
      (keys, values),
    )
  if window is None:
    place = own.position
  else:
    place = own.position % room
    last &= own.position >= length[:, None] - room
  place = jnp.where(last, place, room)  # out of range: dropped
  return AttentionState(
    keys=token_layout.put_rows(keys, place, own.k),
    values=token_layout.put_rows(values, place, own.v),
    length=length,
  )
