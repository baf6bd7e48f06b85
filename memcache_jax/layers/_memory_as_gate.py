"""`MemoryAsGate`: attention in a window, and a memory beside it."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import Array, Bool, DType, Float
from memcache_jax.caching import SelectionReport
from memcache_jax.layers._attention import Attention, AttentionState
from memcache_jax.layers._base import Mixer, check_inputs, check_state_kind
from memcache_jax.layers._branch_gate import BranchGate
from memcache_jax.layers._memory_mixer import MemoryMixer, MixerState
from memcache_jax.memories import Memory, Watched


class MemoryAsGateState(NamedTuple):
  """State of a `MemoryAsGate`: those of its branches."""

  attention: AttentionState
  memory: MixerState


class MemoryAsGate(Mixer):
  r"""Precise short-term memory, gated by a fading long-term one.

  .. math::
    y = \mathrm{attention}_{window}([p\,|\,x]), \quad m = \mathrm{memory}(x),
    \quad o = \mathrm{RMSNorm}(y) \odot \sigma(\mathrm{RMSNorm}(m))

  Titans (arXiv 2501.00663), section 4.2, MAG. The persistent tokens p are read
  by attention; what the paper has the memory write of them its learned
  initial state can hold.

  Args:
    dim: model width, d.
    num_heads: heads of both branches, n.
    memory: any memory, cached or not.
    window: tokens that attention sees.
    persistent_tokens: learned tokens that it always sees.
    out_scale: factor on the output at the start.
    dtype: compute dtype; gates, softmax and recurrent state are float32.
    param_dtype: of the stored weights.
    rngs: where the initial weights come from.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import MemoryAsGate
    >>> from memcache_jax.memories import Linear
    >>> mixer = MemoryAsGate(16, 2, Linear(), window=4, rngs=nnx.Rngs(0))
    >>> y, state = mixer(jnp.ones((1, 20, 16)))
    >>> y.shape
    (1, 20, 16)
  """

  def __init__(
    self,
    dim: int,
    num_heads: int,
    memory: Memory,
    *,
    window: int = 2048,
    persistent_tokens: int = 4,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.dim = dim
    self.attention = Attention(
      dim,
      num_heads,
      window=window,
      persistent_tokens=persistent_tokens,
      **options,
    )
    self.memory_mixer = MemoryMixer(dim, num_heads, memory, **options)
    self.gate = BranchGate(dim, out_scale, param_dtype)

  @property
  def memory(self) -> Memory:
    """That of the second branch."""
    return self.memory_mixer.memory

  @property
  def uses_segment_ends(self) -> bool:
    return self.memory_mixer.uses_segment_ends

  def init_state(self, batch: int, max_length: int) -> MemoryAsGateState:
    """The state before the first token; see `Mixer.init_state`."""
    return MemoryAsGateState(
      self.attention.init_state(batch, max_length),
      self.memory_mixer.init_state(batch, max_length),
    )

  def __call__(
    self,
    x: Float[Array, "b t d"],
    state: MemoryAsGateState | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], MemoryAsGateState]:
    """Mixes a stretch of tokens; see `Mixer`."""
    check_inputs(x, self.dim, mask, starts, segment_ends)
    check_state_kind(state, MemoryAsGateState)
    of_attention, of_memory = (None, None) if state is None else state
    y, of_attention = self.attention(x, of_attention, mask=mask, starts=starts)
    m, of_memory = self.memory_mixer(
      x,
      of_memory,
      mask=mask,
      starts=starts,
      max_unaligned_starts=max_unaligned_starts,
      segment_ends=segment_ends,
      rngs=rngs,
    )
    return self.gate(y, m), MemoryAsGateState(of_attention, of_memory)

  def inspect(
    self,
    x: Float[Array, "b t d"],
    state: MemoryAsGateState | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[
    Float[Array, "b t d"], MemoryAsGateState, Float[Array, "b t n s_and_online"]
  ]:
    """Like calling the layer, and returns the gates of a cached memory too.

    See `MemoryMixer.inspect`.
    """
    check_state_kind(state, MemoryAsGateState)
    of_attention, of_memory = (None, None) if state is None else state
    m, of_memory, weights = self.memory_mixer.inspect(
      x,
      of_memory,
      mask=mask,
      starts=starts,
      max_unaligned_starts=max_unaligned_starts,
      segment_ends=segment_ends,
      rngs=rngs,
    )
    y, of_attention = self.attention(x, of_attention, mask=mask, starts=starts)
    state = MemoryAsGateState(of_attention, of_memory)
    return self.gate(y, m), state, weights

  def watch(
    self, x: Float[Array, "b t d"], *, mask: Bool[Array, "b t"] | None = None
  ) -> Watched:
    """What the memory does at every token; see `MemoryMixer.watch`."""
    return self.memory_mixer.watch(x, mask=mask)

  def watch_selection(
    self,
    x: Float[Array, "b t d"],
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> SelectionReport:
    """What tokens select; see `MemoryMixer.watch_selection`."""
    return self.memory_mixer.watch_selection(
      x,
      mask=mask,
      starts=starts,
      max_unaligned_starts=max_unaligned_starts,
      segment_ends=segment_ends,
      rngs=rngs,
    )
