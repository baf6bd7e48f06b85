"""`MemoryAsContext`: attention to what a memory recalls, segment by segment."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax import sharding, token_layout
from memcache_jax.array_typing import Array, Bool, DType, Float, Int, State
from memcache_jax.caching import Cached, Constant
from memcache_jax.caching._layout import lay_out
from memcache_jax.caching._next_state import poison
from memcache_jax.layers import _softmax_attention
from memcache_jax.layers._attention import Attention
from memcache_jax.layers._base import (
  Front,
  Mixer,
  check_inputs,
  check_state_kind,
  to_front,
)
from memcache_jax.layers._branch_gate import BranchGate
from memcache_jax.layers._memory_mixer import MemoryMixer, MixerState
from memcache_jax.layers._softmax_attention import Keys
from memcache_jax.memories import Memory, Tokens, Watched
from memcache_jax.memories._axes import state_axes, stored_axes
from memcache_jax.ops import _checks


class MemoryAsContextState(NamedTuple):
  """State of a `MemoryAsContext`.

  Attributes:
    keys: of the running segment, c places for its tokens and c for what was
      recalled at them; in compute dtype, like the values.
    values: likewise.
    position: tokens in the running segment, below c.
    recalled: the memory when the segment began; what `snapshot` returned.
    query: last inputs of the convolution of the queries that recall.
    memory: of the mixer that writes.
  """

  keys: Float[Array, "b two_c n k"]
  values: Float[Array, "b two_c n k"]
  position: Int[Array, " b"]
  recalled: State
  query: Float[Array, "b w_less_1 n k"]
  memory: MixerState


class MemoryAsContext(Mixer):
  r"""Attention within a segment and to what is recalled of earlier ones.

  .. math::
    h &= M_{before}(x), \quad
    y = \mathrm{attention}([p\,|\,h\,|\,x]) \text{ in the segment} \\
    m_t &= M_t(y_t) \text{ after writing } y_t, \quad
    o = \mathrm{RMSNorm}(y) \odot \sigma(\mathrm{RMSNorm}(m))

  Titans (arXiv 2501.00663), section 4.1, MAC, where M_before is the memory when
  the segment began, read only. Two things are made causal here: a token sees
  what was recalled at it and at earlier ones, and reads the memory as it is
  after its own token, not after the segment. Recalling and writing share the
  projections of one `MemoryMixer`. Segments come one after another.

  Args:
    dim: model width, d.
    num_heads: heads of attention and memory, n.
    memory: any memory that is not cached.
    segment_length: tokens that see one another, c; counted from the start of
      each document.
    persistent_tokens: learned tokens that every token sees.
    out_scale: factor on the output at the start.
    dtype: compute dtype; gates, softmax and recurrent state are float32.
    param_dtype: of the stored weights.
    rngs: where the initial weights come from.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import MemoryAsContext
    >>> from memcache_jax.memories import Linear
    >>> mixer = MemoryAsContext(
    ...   16, 2, Linear(), segment_length=8, rngs=nnx.Rngs(0)
    ... )
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
    segment_length: int = 256,
    persistent_tokens: int = 4,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    _checks.check_positive(segment_length=segment_length)
    if isinstance(memory, Cached):
      raise ValueError(
        "`memory` must not be cached, as only one memory is recalled: "
        f"got {memory!r}."
      )
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.dim = dim
    self.segment_length = segment_length
    self.attention = Attention(
      dim, num_heads, persistent_tokens=persistent_tokens, **options
    )
    self.memory_mixer = MemoryMixer(dim, num_heads, memory, **options)
    self.gate = BranchGate(dim, out_scale, param_dtype)

  @property
  def memory(self) -> Memory:
    """What is written, and recalled from."""
    return self.memory_mixer.memory

  def init_state(self, batch: int, max_length: int) -> MemoryAsContextState:
    """The state before the first token; see `Mixer.init_state`."""
    memory = self.memory_mixer.init_state(batch, max_length)
    attention = self.attention.init_state(batch, 2 * self.segment_length)
    return MemoryAsContextState(
      keys=attention.keys,
      values=attention.values,
      position=attention.length,
      recalled=self.memory.snapshot(memory.memory),
      query=memory.q,
      memory=memory,
    )

  def __call__(
    self,
    x: Float[Array, "b t d"],
    state: MemoryAsContextState | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], MemoryAsContextState]:
    """Mixes a stretch of tokens; see `Mixer`."""
    del rngs  # The memory is not a cached one: nothing is drawn.
    if segment_ends is not None:
      raise ValueError(
        "`segment_ends` must be None for memory as context: got flags."
      )
    check_inputs(x, self.dim, mask, starts)
    check_state_kind(state, MemoryAsContextState)
    front = to_front(x, mask, starts)
    _, o, state = self._run(front, state, max_unaligned_starts)
    return front.back(o), state

  def watch(
    self, x: Float[Array, "b t d"], *, mask: Bool[Array, "b t"] | None = None
  ) -> Watched:
    """What the memory does at every token; see `MemoryMixer.watch`."""
    check_inputs(x, self.dim, mask, None)
    front = to_front(x, mask, None)
    y, _, _ = self._run(front, None, None)
    return self.memory_mixer.watch(front.back(y), mask=mask)

  def _run(
    self,
    front: Front,
    state: MemoryAsContextState | None,
    max_unaligned_starts: int | None,
  ) -> tuple[Array, Array, MemoryAsContextState]:
    """What attention gives and the layer returns at every token, and state."""
    b, t = front.x.shape[:2]
    initial = self.init_state(b, 1)
    if state is not None:
      _checks.check_state(state, initial)
    before = initial if state is None else state
    if t == 0:
      return front.x, front.x, before
    q, tail = self.memory_mixer.queries(front, before.query)
    before = self._place(before, q)
    if t == 1:
      fresh = None if front.starts is None else front.starts[:, 0]
      y, o, after = self._segment(before, front.x, q, front.valid, fresh)
      return y, o, after._replace(query=tail)
    layout = lay_out(
      Tokens(
        q=front.x,
        k=front.x,
        v=front.x,
        mask=front.valid,
        starts=front.starts,
        max_unaligned_starts=max_unaligned_starts,
      ),
      state,
      Constant(self.segment_length),
    )

    # The backward pass computes a segment anew, from the state before it.
    @jax.checkpoint
    def segment(state, inputs):
      y, o, state = self._segment(state, *inputs)
      return state, (y, o)

    inputs = (*layout.spread((front.x, q)), layout.valid, layout.fresh)
    swap = lambda x: jnp.moveaxis(x, 1, 0)
    after, outputs = jax.lax.scan(segment, before, jax.tree.map(swap, inputs))
    y, o = layout.collect(jax.tree.map(swap, outputs))
    if layout.lost is not None:
      after = poison(after, layout.lost)
    return y, o, after._replace(query=tail)

  def _segment(self, state, x, q, valid, fresh):
    """Tokens of one segment of each row, of which some or all are there."""
    b, t = x.shape[:2]
    if fresh is not None:
      initial = self._place(self.init_state(b, 1), q)
      state = token_layout.select_rows(fresh, initial, state)
    there = jnp.ones((b, t), bool) if valid is None else valid
    rank = jnp.cumsum(there, axis=1, dtype=jnp.int32)
    position = state.position[:, None] + rank - 1
    count = state.position + rank[:, -1]
    opens = (state.position == 0) & (count > 0)
    # Nothing of an earlier segment may stay, not even a nan.
    begun = state._replace(
      keys=jnp.zeros_like(state.keys),
      values=jnp.zeros_like(state.values),
      recalled=self.memory.snapshot(state.memory.memory),
    )
    state = token_layout.select_rows(opens, begun, state)
    h = self.memory_mixer.recall(x, q, state.recalled)
    y, keys, values = self._attend(state, x, h, position, there, count)
    m, memory = self.memory_mixer(y, state.memory, mask=valid)
    state = state._replace(
      keys=keys,
      values=values,
      position=count % self.segment_length,
      memory=memory,
    )
    return y, self.gate(y, m), state

  def _attend(self, state, x, h, position, valid, count):
    """Attention in the segment, whose keys are written first."""
    attention = self.attention
    both = lambda layer: jnp.concatenate([layer(x), layer(h)], axis=1)
    q, k, v = attention.q(x), both(attention.k), both(attention.v)
    persistent = attention.persistent_keys()
    # Rows and heads never mix: every device attends with those it holds.
    y, keys, values = sharding.over_devices(
      self._attend_own,
      (q, k, v, state.keys, state.values, position, valid, count, persistent),
      (
        *("b t n k",) * 5,
        *("b t", "b t", "b", jax.tree.map(lambda x: "m n k", persistent)),
      ),
      ("b t n k",) * 3,
    )
    return attention.out(y), keys, values

  def _attend_own(
    self, q, k, v, keys, values, position, valid, count, persistent
  ):
    """Attention, and the keys and values of the segment so far."""
    attention, c = self.attention, self.segment_length
    twice = lambda a, b: jnp.concatenate([a, b], axis=1)
    own = jnp.where(valid, position, 2 * c)  # out of range: dropped
    place = twice(own, own + c)
    k = attention.keys(k, twice(position, position))
    keys = token_layout.put_rows(keys, place, k)
    values = token_layout.put_rows(values, place, v)
    places = jnp.broadcast_to(jnp.arange(2 * c)[None] % c, keys.shape[:2])
    filled = places < count[:, None]
    stored = Keys(keys, values, places, jnp.where(filled, 0, -1))
    y = _softmax_attention.attend_stored(
      attention.queries(q, position, jnp.where(valid, 0, -1)),
      (stored, *persistent),
      chunk_size=attention.chunk_size,
    )
    return y, keys, values

  def _place(self, state, q):
    """A state, spread over devices as the queries of its rows are."""
    if not any(sharding.spec_of(q)):
      return state
    shape, recalled = self.memory_mixer.shape, stored_axes(state.recalled)
    memory = state_axes(self.memory, shape, 1, state.memory.memory)
    memory = MixerState._make((*("b t n k",) * 3, memory))
    axes = "b t n k", "b t n k", "b", recalled, "b t n k", memory
    axes = MemoryAsContextState._make(axes)
    return sharding.spread_like(state, axes, q, "b t n k")
