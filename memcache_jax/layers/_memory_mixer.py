"""`MemoryMixer`: the layer around a memory, the same for every memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, DType, Float, State
from memcache_jax.caching import SelectionReport, watch_selection
from memcache_jax.layers._base import (
  Front,
  Mixer,
  check_inputs,
  check_layer,
  check_state_kind,
  draw_seeds,
  to_front,
)
from memcache_jax.layers._gates import Gates
from memcache_jax.layers._norm import RMSNorm
from memcache_jax.layers._params import InitialMemory, Projection
from memcache_jax.layers._short_conv import ShortConv
from memcache_jax.memories import HeadShape, Memory, Tokens, Watched, _spread
from memcache_jax.ops import _checks


class MixerState(NamedTuple):
  """State of a `MemoryMixer`: last inputs of the convolutions, and memory."""

  q: Float[Array, "b w_less_1 n k"]
  k: Float[Array, "b w_less_1 n k"]
  v: Float[Array, "b w_less_1 n v"]
  memory: State


class MemoryMixer(Mixer):
  r"""Mixes tokens through a recurrent memory.

  .. math::
    q, k, v &= \mathrm{SiLU}(\mathrm{conv}(h W_q)), \dots
      \quad q, k \text{ of length 1 per head} \\
    y &= \mathrm{memory}(q, k, v, \mathrm{gates}(h)) \\
    o &= (\mathrm{RMSNorm}_{head}(y) \odot \mathrm{SiLU}(h W_g)) W_o

  The block around the memory of Titans (arXiv 2501.00663), section 4.4, and
  Miras (arXiv 2504.13173); Memory Caching (arXiv 2602.24281) builds on it.
  Everything a memory wants besides q, k and v comes from `memory.gates()`.

  Args:
    dim: model width, d.
    num_heads: heads, n.
    memory: any memory, cached or not.
    key_dim: width of queries and keys per head, k; d / n by default.
    value_dim: width of values per head, v; d / n by default.
    conv_width: tokens the convolutions see.
    out_scale: factor on the initial output projection.
    dtype: compute dtype; gates, memory parameters and state are float32.
    param_dtype: of the stored weights.
    rngs: where the initial weights come from.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.caching import Cached, Constant
    >>> from memcache_jax.layers import MemoryMixer
    >>> from memcache_jax.memories import Linear
    >>> memory = Cached(Linear(), Constant(8))
    >>> mixer = MemoryMixer(16, 2, memory, rngs=nnx.Rngs(0))
    >>> run, state = jax.jit(MemoryMixer.__call__), mixer.init_state(1, 32)
    >>> y, state = run(mixer, jnp.ones((1, 20, 16)), state)
    >>> y, state = run(mixer, jnp.ones((1, 1, 16)), state)
    >>> y.shape
    (1, 1, 16)
  """

  def __init__(
    self,
    dim: int,
    num_heads: int,
    memory: Memory,
    *,
    key_dim: int | None = None,
    value_dim: int | None = None,
    conv_width: int = 4,
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
      key_dim=key_dim,
      value_dim=value_dim,
    )
    _checks.check_positive(conv_width=conv_width)
    if not isinstance(memory, Memory):
      raise ValueError(f"`memory` must be a Memory: got {memory!r}.")
    shape = HeadShape(
      num_heads, key_dim or dim // num_heads, value_dim or dim // num_heads
    )
    n, k, v = shape
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.dim = dim
    self.shape = shape
    self.memory = memory
    self.q = Projection("dnk", (dim, n, k), **options)
    self.k = Projection("dnk", (dim, n, k), **options)
    self.v = Projection("dnv", (dim, n, v), **options)
    self.q_conv = ShortConv((n, k), conv_width, **options)
    self.k_conv = ShortConv((n, k), conv_width, **options)
    self.v_conv = ShortConv((n, v), conv_width, **options)
    self.gates = Gates(dim, shape, memory.gates(), **options)
    self.norm = RMSNorm((n, v))
    self.out_gate = Projection("dnv", (dim, n, v), **options)
    self.out = Projection(
      "nvd", (n, v, dim), contract=2, scale=out_scale, **options
    )
    params = memory.init_params(rngs.params(), shape)
    self.initial = nnx.data(jax.tree.map(InitialMemory, params))

  @property
  def uses_segment_ends(self) -> bool:
    return self.memory.uses_segment_ends

  def init_state(self, batch: int, max_length: int) -> MixerState:
    """The state before the first token; see `Mixer.init_state`."""
    _checks.check_positive(batch=batch, max_length=max_length)
    return MixerState(
      q=self.q_conv.init_state(batch),
      k=self.k_conv.init_state(batch),
      v=self.v_conv.init_state(batch),
      memory=self.memory.init_state(
        self._memory_params(), self.shape, batch, max_length=max_length
      ),
    )

  def __call__(
    self,
    x: Float[Array, "b t d"],
    state: MixerState | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], MixerState]:
    """Mixes a stretch of tokens; see `Mixer`."""
    check_inputs(x, self.dim, mask, starts, segment_ends)
    check_state_kind(state, MixerState)
    front = to_front(x, mask, starts, segment_ends)
    tokens, tails = self._tokens(front, state, max_unaligned_starts, rngs)
    y, memory = _spread.scan(
      self.memory,
      self._memory_params(),
      None if state is None else state.memory,
      tokens,
    )
    y = checkpoint_name(y, "reads")
    y = front.back(self._output(front.x, y))
    return y, tails._replace(memory=memory)

  def inspect(
    self,
    x: Float[Array, "b t d"],
    state: MixerState | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[
    Float[Array, "b t d"], MixerState, Float[Array, "b t n s_and_online"]
  ]:
    """Like calling the layer, and returns the gates of a cached memory too.

    Returns:
      y, the state, and the weight with which every token reads each memory,
      as `Cached.inspect` orders them.

    Raises:
      ValueError: when the memory has no such weights.
    """
    if not hasattr(self.memory, "inspect"):
      raise ValueError(
        f"`memory` must be a cached one to be inspected: got {self.memory!r}."
      )
    check_inputs(x, self.dim, mask, starts, segment_ends)
    check_state_kind(state, MixerState)
    front = to_front(x, mask, starts, segment_ends)
    tokens, tails = self._tokens(front, state, max_unaligned_starts, rngs)
    y, memory, weights = _spread.inspect(
      self.memory,
      self._memory_params(),
      None if state is None else state.memory,
      tokens,
    )
    y = front.back(self._output(front.x, y))
    return y, tails._replace(memory=memory), front.back(weights)

  def watch(
    self, x: Float[Array, "b t d"], *, mask: Bool[Array, "b t"] | None = None
  ) -> Watched:
    """What the memory does at every token of new sequences; see `watch`.

    Args:
      x: as in a call.
      mask: as in a call.
    """
    check_inputs(x, self.dim, mask, None)
    front = to_front(x, mask, None)
    tokens, _ = self._tokens(front, None, None, None)
    watched = _spread.watch(self.memory, self._memory_params(), tokens)
    return jax.tree.map(front.back, watched)

  def queries(
    self, front: Front, tail: Float[Array, "b w_less_1 n k"] | None
  ) -> tuple[Float[Array, "b t n k"], Float[Array, "b w_less_1 n k"]]:
    """With what tokens read the memory, and the state of the convolution."""
    q, tail = self.q_conv.convolve(
      self.q(front.x), tail, front.starts, front.count
    )
    return numerics.l2_normalize(jax.nn.silu(q)), tail

  def recall(
    self, x: Float[Array, "b t d"], q: Float[Array, "b t n k"], memory: State
  ) -> Float[Array, "b t d"]:
    """What the layer returns of what `Memory.snapshot` returned; no writing."""
    y = _spread.read(self.memory, self._memory_params(), memory, q)
    return self._output(x, y.astype(q.dtype))

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
    """What the tokens of new sequences select; see `caching.watch_selection`.

    All arguments are those of a call.
    """
    check_inputs(x, self.dim, mask, starts, segment_ends)
    front = to_front(x, mask, starts, segment_ends)
    tokens, _ = self._tokens(front, None, max_unaligned_starts, rngs)
    return watch_selection(self.memory, tokens)

  def _tokens(self, front, state, max_unaligned_starts, rngs):
    """What the memory consumes, and the state of the convolutions."""
    if state is not None:
      self.memory.check_state(
        self._memory_params(), state.memory, self.shape, front.x.shape[0]
      )
    tails = (None,) * 3 if state is None else (state.q, state.k, state.v)
    q, tail_of_q = self.queries(front, tails[0])
    k, tail_of_k = self.k_conv.convolve(
      self.k(front.x), tails[1], front.starts, front.count
    )
    v, tail_of_v = self.v_conv.convolve(
      self.v(front.x), tails[2], front.starts, front.count
    )
    tokens = Tokens(
      q=q,
      k=numerics.l2_normalize(jax.nn.silu(k)),
      v=jax.nn.silu(v),
      gates=self.gates(front.x),
      mask=front.valid,
      starts=front.starts,
      max_unaligned_starts=max_unaligned_starts,
      segment_ends=front.segment_ends,
      seeds=draw_seeds(rngs, front.x),
    )
    return tokens, MixerState(tail_of_q, tail_of_k, tail_of_v, None)

  def _output(self, x, y):
    return self.out(self.norm(y) * jax.nn.silu(self.out_gate(x)))

  def _memory_params(self):
    return jax.tree.map(
      lambda variable: variable[...],
      self.initial,
      is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
