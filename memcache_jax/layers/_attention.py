"""`Attention`: causal softmax attention, full or in a sliding window."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memcache_jax import sharding, token_layout
from memcache_jax.array_typing import Array, Bool, DType, Float, Int
from memcache_jax.layers import _attention_state, _rope, _softmax_attention
from memcache_jax.layers._attention_state import AttentionState
from memcache_jax.layers._base import (
  Mixer,
  check_inputs,
  check_layer,
  check_state_kind,
  to_front,
)
from memcache_jax.layers._params import Projection, normal
from memcache_jax.layers._short_conv import ShortConv
from memcache_jax.layers._softmax_attention import Keys, Queries
from memcache_jax.ops import _checks


class Attention(Mixer):
  r"""Causal softmax attention with rotary positions.

  ``y = softmax(q k^T / sqrt(k)) v`` per head over the tokens of the document
  so far, or over the last `window` of them, the token itself included.
  Positions count the real tokens of a document. The state of full attention
  has room for `max_length` tokens; outputs beyond it are nan. That of a
  window holds `window` tokens for ever. Persistent tokens are learned, and
  stand before every document for as long as it lasts: each token sees them
  besides the window, and they have no position. They are the persistent
  memory of Titans (arXiv 2501.00663), section 3.3.

  With `conv_width`, short convolutions follow the projections, as in Primer
  (arXiv 2109.08668): a token's key then also holds the token before it, and
  associations are recalled by one layer instead of two.

  Args:
    dim: model width, d.
    num_heads: heads, n.
    window: tokens seen; None for all.
    persistent_tokens: learned tokens that every token sees.
    head_dim: width per head, k, even; d / n by default.
    conv_width: tokens the convolutions see; 1 for none.
    chunk_size: queries computed at a time; bounds memory, changes nothing.
    rope_theta: base of the rotary frequencies.
    out_scale: factor on the initial output projection.
    dtype: compute dtype; the softmax is float32.
    param_dtype: of the stored weights.
    rngs: where the initial weights come from.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import Attention
    >>> attention = Attention(16, 2, window=4, rngs=nnx.Rngs(0))
    >>> run = jax.jit(Attention.__call__)
    >>> y, state = run(attention, jnp.ones((1, 20, 16)))
    >>> state.keys.shape
    (1, 4, 2, 8)
  """

  def __init__(
    self,
    dim: int,
    num_heads: int,
    *,
    window: int | None = None,
    persistent_tokens: int = 0,
    head_dim: int | None = None,
    conv_width: int = 1,
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
    _checks.check_positive(conv_width=conv_width, chunk_size=chunk_size)
    _checks.check_number(rope_theta=rope_theta, low=0, open_low=True)
    if persistent_tokens != 0:
      _checks.check_positive(persistent_tokens=persistent_tokens)
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
    self.convs = nnx.data(None)
    if conv_width > 1:
      self.convs = nnx.List(
        [ShortConv((n, k), conv_width, **options) for _ in "qkv"]
      )
    self.persistent = nnx.data(None)
    if persistent_tokens:
      shape = (persistent_tokens, dim)
      self.persistent = nnx.Param(normal(rngs, shape, param_dtype))

  def init_state(self, batch: int, max_length: int) -> AttentionState:
    """The state before the first token; see `Mixer.init_state`."""
    _checks.check_positive(batch=batch, max_length=max_length)
    room = max_length if self.window is None else self.window
    shape = (batch, room, self.num_heads, self.head_dim)
    return AttentionState(
      keys=jnp.zeros(shape, self.dtype),
      values=jnp.zeros(shape, self.dtype),
      length=jnp.zeros((batch,), jnp.int32),
      tails=None
      if self.convs is None
      else tuple(conv.init_state(batch) for conv in self.convs),
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
    if state is not None and (state.tails is None) != (self.convs is None):
      raise ValueError(
        "`state` must be of this layer: got one of a layer "
        f"{'without' if self.convs else 'with'} convolutions."
      )
    if state is not None and self.window not in (None, state.keys.shape[1]):
      raise ValueError(
        f"`state` must hold the {self.window} tokens of this layer's window: "
        f"got room for {state.keys.shape[1]}."
      )
    front = to_front(x, mask, starts)
    (q, k, v), tails = self._project(front, state)
    flags, persistent = front._replace(x=None), self.persistent_keys()
    spread = AttentionState._make(("b m n k", "b m n k", "b", None))
    # Rows and heads never mix: every device attends with those it holds.
    y, new_state = sharding.over_devices(
      self._attend,
      (q, k, v, state and state._replace(tails=None), flags, persistent),
      (
        *("b t n k",) * 3,
        None if state is None else spread,
        jax.tree.map(lambda x: "b t" if x.ndim == 2 else "b", flags),
        jax.tree.map(lambda x: "m n k", persistent),
      ),
      ("b t n k", spread),
    )
    y = checkpoint_name(y, "reads")
    return front.back(self.out(y)), new_state._replace(tails=tails)

  def _project(self, front, state):
    """Queries, keys and values, and the state of their convolutions."""
    projected = self.q(front.x), self.k(front.x), self.v(front.x)
    if self.convs is None:
      return projected, None
    tails = (None,) * 3 if state is None else state.tails
    convolved, tails = zip(
      *(
        conv.convolve(x, tail, front.starts, front.count)
        for conv, x, tail in zip(self.convs, projected, tails, strict=True)
      ),
      strict=True,
    )
    return convolved, tails

  def _attend(self, q, k, v, state, front, persistent):
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
    queries = self.queries(q, position, document)
    own = Keys(self.keys(k, position), v, position, document)

    new_state = _attention_state.write(
      own, state, self.window, has_starts=front.starts is not None
    )
    if t == 1 and state is not None:
      # Written first, the state is read where it lies: a decode step then
      # updates it in place. Its one document is 0, or 1 where it just began.
      stored = _attention_state.stored(new_state, self.window, document)
      y = _softmax_attention.attend_stored(
        queries, (stored, *persistent), window=self.window
      )
    else:
      stored = (
        () if state is None else (_attention_state.stored(state, self.window),)
      )
      y = _softmax_attention.attend(
        *(queries, own, (*stored, *persistent)),
        window=self.window,
        chunk_size=self.chunk_size,
      )
    if state is not None and self.window is None:
      lost = position >= state.keys.shape[1]
      y = jnp.where(lost[..., None, None], jnp.full((), jnp.nan, y.dtype), y)
    return y, new_state

  def queries(
    self,
    q: Float[Array, "b t n k"],
    position: Int[Array, "b t"],
    document: Int[Array, "b t"],
  ) -> Queries:
    """Queries of tokens in their documents, -1 for tokens that read nothing."""
    plain = (q.astype(jnp.float32) * self.head_dim**-0.5).astype(q.dtype)
    q = _rope.rotate(plain, position, self.rope_theta)
    return Queries(q, plain, position, document)

  def keys(
    self, k: Float[Array, "b t n k"], position: Int[Array, "b t"]
  ) -> Float[Array, "b t n k"]:
    """Keys of tokens at these positions."""
    return _rope.rotate(k, position, self.rope_theta)

  def persistent_keys(self) -> tuple[Keys, ...]:
    """Keys and values of the persistent tokens, if there are any."""
    if self.persistent is None:
      return ()
    tokens = self.persistent[...][None]
    return (Keys(self.k(tokens)[0], self.v(tokens)[0], None, None),)
