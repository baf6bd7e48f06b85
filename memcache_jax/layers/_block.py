"""`Block`: a mixer and a feed-forward layer on a residual stream."""

import jax.numpy as jnp
from flax import nnx

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, DType, Float, State
from memcache_jax.layers._base import Mixer, check_inputs
from memcache_jax.layers._feed_forward import SwiGLU
from memcache_jax.layers._memory_as_gate import MemoryAsGate
from memcache_jax.layers._memory_mixer import MemoryMixer
from memcache_jax.layers._norm import RMSNorm


class Block(nnx.Module):
  """``x = x + mixer(norm(x))``, then ``x = x + swiglu(norm(x))``.

  Args:
    mixer: how tokens see earlier ones; its `dim` is the width of the block.
    hidden_dim: of the feed-forward layer; see `SwiGLU`.
    out_scale: factor on the initial output projection of the feed-forward
      layer.
    dtype: compute dtype.
    param_dtype: of the stored weights.
    rngs: where the initial weights come from.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import Attention, Block
    >>> rngs = nnx.Rngs(0)
    >>> block = Block(Attention(8, 2, rngs=rngs), 16, rngs=rngs)
    >>> y, state = jax.jit(Block.__call__)(block, jnp.ones((1, 3, 8)))
    >>> y.shape
    (1, 3, 8)
  """

  def __init__(
    self,
    mixer: Mixer,
    hidden_dim: int | None = None,
    *,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.mixer_norm = RMSNorm(mixer.dim)
    self.mixer = mixer
    self.feed_forward_norm = RMSNorm(mixer.dim)
    self.feed_forward = SwiGLU(
      mixer.dim,
      hidden_dim,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  @property
  def uses_segment_ends(self) -> bool:
    """Whether `segment_ends` means anything to the mixer."""
    return self.mixer.uses_segment_ends

  def init_state(self, batch: int, max_length: int) -> State:
    """The state before the first token; see `Mixer.init_state`."""
    return self.mixer.init_state(batch, max_length)

  def __call__(
    self,
    x: Float[Array, "b t d"],
    state: State | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], State]:
    """Transforms a stretch of tokens; see `Mixer`, but x is as it comes."""
    check_inputs(x, self.mixer.dim, mask, starts)
    if mask is not None:
      # Masked tokens may hold anything, which must reach no gradient.
      x = token_layout.zero_masked(x, mask)
    y, state = self.mixer(
      self.mixer_norm(x),
      state,
      mask=mask,
      starts=starts,
      max_unaligned_starts=max_unaligned_starts,
      segment_ends=segment_ends,
      rngs=rngs,
    )
    return self._feed(x + y), state

  def inspect(
    self,
    x: Float[Array, "b t d"],
    state: State | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], State, Float[Array, "b t n s_and_online"]]:
    """Like calling the block, and returns the mixer's gates too.

    Raises:
      ValueError: when the mixer has no cached memory.
    """
    if not isinstance(self.mixer, MemoryMixer | MemoryAsGate):
      raise ValueError(
        "`mixer` must be a MemoryMixer or a MemoryAsGate to be inspected: "
        f"got {type(self.mixer).__name__}."
      )
    check_inputs(x, self.mixer.dim, mask, starts)
    if mask is not None:
      # Masked tokens may hold anything, which must reach no gradient.
      x = token_layout.zero_masked(x, mask)
    y, state, weights = self.mixer.inspect(
      self.mixer_norm(x),
      state,
      mask=mask,
      starts=starts,
      max_unaligned_starts=max_unaligned_starts,
      segment_ends=segment_ends,
      rngs=rngs,
    )
    return self._feed(x + y), state, weights

  def _feed(self, x):
    return x + self.feed_forward(self.feed_forward_norm(x))
