"""`Attention`: causal softmax attention, full or in a sliding window."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, DType, Float, Int
from memcache_jax.layers import _rope, _softmax_attention
from memcache_jax.layers._base import (
  Mixer,
  check_inputs,
  check_layer,
  check_state_kind,
  to_front,
)
from memcache_jax.layers._params import Projection
from memcache_jax.layers._softmax_attention import Keys
from memcache_jax.ops import _checks


class AttentionState(NamedTuple):
  """Keys and values of the running document, in compute dtype.

  Attributes:
    keys: already rotated. Position p lies at place p, or in a window at
      place p modulo the window.
    values: like keys.
    length: tokens of the running document.
  """

  keys: Float[Array, "b m n k"]
  values: Float[Array, "b m n k"]
  length: Int[Array, " b"]


class Attention(Mixer):
  r"""Causal softmax attention with rotary positions.

  ``y = softmax(q k^T / sqrt(k)) v`` per head over the tokens of the document
  so far, or over the last `window` of them, the token itself included.
  Positions count the real tokens of a document. The state of full attention
  has room for `max_length` tokens; outputs beyond it are nan. That of a
  window holds `window` tokens for ever.

  Args:
    dim: model width, d.
    num_heads: heads, n.
    window: tokens seen; None for all.
    head_dim: width per head, k, even; d / n by default.
    chunk_size: queries computed at a time; bounds memory, changes nothing.
    rope_theta: base of the rotary frequencies.
    out_scale: factor on the initial output projection.
    dtype: compute dtype; the softmax is float32.
    param_dtype: of the stored weights.
    rngs: where the initial weights come from.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import Attention
    >>> attention = Attention(16, 2, window=4, rngs=nnx.Rngs(0))
    >>> y, state = attention(jnp.ones((1, 20, 16)))
    >>> state.keys.shape
    (1, 4, 2, 8)
  """

  def __init__(
    self,
    dim: int,
    num_heads: int,
    *,
    window: int | None = None,
    head_dim: int | None = None,
    chunk_size: int = 512,
    rope_theta: float = 10_000.0,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_layer(
      dim,
      num_heads,
      rngs,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      head_dim=head_dim,
    )
    _checks.check_positive(chunk_size=chunk_size)
    _checks.check_number(rope_theta=rope_theta, low=0, open_low=True)
    if window is not None:
      _checks.check_positive(window=window)
    n, k = num_heads, head_dim or dim // num_heads
    if k % 2:
      raise ValueError(
        f"`head_dim` must be even for rotary positions: got {k}."
      )
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.dim = dim
    self.num_heads = n
    self.head_dim = k
    self.window = window
    self.chunk_size = chunk_size
    self.rope_theta = rope_theta
    self.dtype = dtype
    self.q = Projection("dnk", (dim, n, k), **options)
    self.k = Projection("dnk", (dim, n, k), **options)
    self.v = Projection("dnk", (dim, n, k), **options)
    self.out = Projection(
      "nkd", (n, k, dim), contract=2, scale=out_scale, **options
    )

  def init_state(self, batch: int, max_length: int) -> AttentionState:
    """The state before the first token; see `Mixer.init_state`."""
    _checks.check_positive(batch=batch, max_length=max_length)
    room = max_length if self.window is None else self.window
    shape = (batch, room, self.num_heads, self.head_dim)
    return AttentionState(
      keys=jnp.zeros(shape, self.dtype),
      values=jnp.zeros(shape, self.dtype),
      length=jnp.zeros((batch,), jnp.int32),
    )

  def __call__(
    self,
    x: Float[Array, "b t d"],
    state: AttentionState | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], AttentionState]:
    """Mixes a stretch of tokens; see `Mixer`."""
    del max_unaligned_starts, rngs  # There is no grid, and nothing random.
    if segment_ends is not None:
      raise ValueError("`segment_ends` must be None for attention: got flags.")
    check_inputs(x, self.dim, mask, starts)
    check_state_kind(state, AttentionState)
    front = to_front(x, mask, starts)
    q, k, v = self.q(front.x), self.k(front.x), self.v(front.x)
    y, state = self._attend(q, k, v, state, front)
    return front.back(self.out(y)), state

  def _attend(self, q, k, v, state, front):
    """Attends among tokens of which the real ones come first."""
    b, t = q.shape[:2]
    length = jnp.zeros((b,), jnp.int32) if state is None else state.length
    if state is not None:
      _checks.check_shapes(
        {
          "x, projected,": (q, "b t n k"),
          "state.keys": (state.keys, "b m n k"),
        }
      )
    if front.starts is None:
      position = length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
      document = jnp.zeros((b, t), jnp.int32)
    else:
      position = token_layout.age_in_document(front.starts, length)
      document = jnp.cumsum(front.starts, axis=1, dtype=jnp.int32)
    if front.valid is not None:
      document = jnp.where(front.valid, document, -1)
    q = _rope.rotate(q, position, self.rope_theta)
    q = (q.astype(jnp.float32) * self.head_dim**-0.5).astype(q.dtype)
    k = _rope.rotate(k, position, self.rope_theta)
    own = Keys(k, v, position, document)

    new_state = self._write(own, state, front.starts is not None)
    stored = None if state is None else self._stored(state)
    if t == 1 and state is not None:
      # Written first, the state is read where it lies: a decode step then
      # updates it in place. Its one document is 0, or 1 where it just began.
      stored = self._stored(new_state)
      stored = stored._replace(
        document=jnp.where(stored.document < 0, -1, document)
      )
      y = _softmax_attention.attend_stored(
        q, position, document, stored, window=self.window
      )
    else:
      y = _softmax_attention.attend(
        q, own, stored, window=self.window, chunk_size=self.chunk_size
      )
    if state is not None and self.window is None:
      lost = position >= state.keys.shape[1]
      y = jnp.where(lost[..., None, None], jnp.full((), jnp.nan, y.dtype), y)
    return y, new_state

  def _stored(self, state) -> Keys:
    """What a state holds, as keys of document 0."""
    b, room = state.keys.shape[:2]
    place = jnp.arange(room, dtype=jnp.int32)[None]
    length = state.length[:, None]
    if self.window is None:
      position = jnp.broadcast_to(place, (b, room))
      filled = place < length
    else:
      # The last position that lies at this place.
      position = length - 1 - (length - 1 - place) % room
      filled = position >= 0
    document = jnp.where(filled, 0, -1)
    return Keys(state.keys, state.values, position, document)

  def _write(self, own, state, has_starts) -> AttentionState:
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
      room = t if self.window is None else self.window
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
    if self.window is None:
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
