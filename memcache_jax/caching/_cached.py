"""`Cached`: any memory, plus what it was at the end of every segment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import (
  Array,
  Bool,
  Float,
  Gates,
  Int,
  Params,
  PRNGKeyArray,
  State,
)
from memcache_jax.caching import (
  _by_segment,
  _host,
  _layout,
  _one_segment,
  _over_devices,
  _segment_scan,
  _state,
)
from memcache_jax.caching._aggregators import Aggregator, GatedResidual
from memcache_jax.caching._policies import CachePolicy, check_policy
from memcache_jax.caching._segments import Constant, Segments
from memcache_jax.caching._state import CacheState
from memcache_jax.memories._base import (
  Gate,
  HeadShape,
  Memory,
  Tokens,
  check_tokens,
)
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class Cached(Memory):
  r"""A memory that grows: its state is cached at the end of every segment.

  .. math::
    y_t = \mathrm{Agg}(\{M^{(1)}, \dots, M^{(s-1)}\};\, M_t^{(s)};\, q_t)

  Memory Caching (arXiv 2602.24281), Eq. 4-5. It is itself a memory: it can
  stand wherever the memory inside can, and any split of a sequence into calls
  gives the same result.

  Attributes:
    memory: what is written within a segment; any memory.
    segments: where a document is cut: `Constant(length)`,
      `Explicit(length, max_segments)` or `Logarithmic(length)`.
    aggregate: how cached and online memories are read together.
    write_mode: "independent": every segment starts from the initial memory,
      in parallel. "checkpoint": one running memory, of which the cache holds
      snapshots.
    policy: what is forgotten when a cache of fixed size is full, so that
      streams of constant segments can go on for ever: `DropOldest`,
      `KeepMostUsed`, `MergeNeighbours` or `LogarithmicThinning`. None: nothing
      is, and what comes after the room of a state is nan.

  Example:
    >>> from memcache_jax.caching import Cached, Constant, GatedResidual
    >>> from memcache_jax.memories import Linear
    >>> memory = Cached(Linear(), Constant(64), GatedResidual())
    >>> memory.gates()["u"].kind
    'connector'
  """

  memory: Memory
  segments: Segments = Constant()
  aggregate: Aggregator = GatedResidual()
  write_mode: Literal["independent", "checkpoint"] = "independent"
  policy: CachePolicy | None = None

  spreads_tokens: ClassVar[bool] = True

  def __post_init__(self):
    if isinstance(self.memory, Cached):
      raise ValueError("`memory` must not be cached already: got a Cached.")
    for name, kind in (
      ("memory", Memory),
      ("segments", Segments),
      ("aggregate", Aggregator),
    ):
      value = getattr(self, name)
      if not isinstance(value, kind):
        raise ValueError(
          f"`{name}` must be an instance of {kind.__name__}: got {value!r}."
        )
    _checks.check_choice(
      write_mode=(self.write_mode, ("independent", "checkpoint"))
    )
    check_policy(self.policy, self.segments)
    taken = set(self.memory.gates()) & set(self.aggregate.gates())
    if taken:
      raise ValueError(
        f"`memory` and `aggregate` must not share gate names: got {taken}."
      )

  @property
  def uses_segment_ends(self) -> bool:
    return self.segments.max_flagged > 0

  @property
  def max_length(self) -> int | None:
    """Tokens of a document that can be read whatever room a state has.

    None for any number. With `Explicit`, of one without flags.
    """
    limits = (self.aggregate.max_segments, self.segments.max_flagged)
    known = [limit for limit in limits if limit]
    return min(known) * self.segments.length if known else None

  def capacity(self, max_length: int) -> int:
    """Memories that a state for documents of `max_length` tokens holds."""
    if self.policy is not None:
      return self.policy.slots
    return self.segments.capacity(max_length)

  def limit(self, slots: int) -> int:
    """Segments of a document that `slots` memories suffice for."""
    if self.policy is not None:
      return 2**31 - 1
    return self.segments.limit(slots)

  def readable(
    self, n: Int[Array, "*#rows"], stored: Int[Array, "*#rows"]
  ) -> Bool[Array, "*#rows"]:
    """Whether tokens of segment `n` read the memory cached after `stored`.

    With a policy that takes turns: whether they do if it is still there.
    """
    if self.policy is not None:
      return self.policy.readable(n, stored)
    return self.segments.readable(n, stored)

  def gates(self) -> Mapping[str, Gate]:
    return {**self.memory.gates(), **self.aggregate.gates()}

  def init_params(self, key: PRNGKeyArray, shape: HeadShape) -> Params:
    return self.memory.init_params(key, shape)

  def init_state(
    self,
    params: Params,
    shape: HeadShape,
    batch: int,
    *,
    max_length: int | None = None,
  ) -> CacheState:
    """The state before the first token, with room for what will be cached.

    Args:
      params: of the memory inside.
      shape: sizes of the heads.
      batch: rows.
      max_length: tokens of one document that the cache must hold; from the
        first segment on that would need more room, a longer one becomes nan.
        Must be given, unless there is a policy, which does without it.

    Raises:
      ValueError: when `max_length` is missing or not positive.
    """
    if max_length is None:
      if self.policy is not None:
        return self.empty_state(params, shape, batch, self.policy.slots)
      raise ValueError(
        "`max_length` must be given for a cached memory: the most tokens of "
        "one document that its state must have room for."
      )
    _checks.check_positive(max_length=max_length)
    return self.empty_state(params, shape, batch, self.capacity(max_length))

  def empty_state(
    self, params: Params, shape: HeadShape, batch: int, slots: int
  ) -> CacheState:
    """The state before the first token, with room for `slots` memories."""
    return _state.empty(self, params, shape, batch, slots)

  def check_state(
    self, params: Params, state: State, shape: HeadShape, batch: int
  ) -> None:
    if not isinstance(state, CacheState):
      raise ValueError(
        "`state` must be what `init_state` or `scan` of a Cached memory "
        f"returned: got a {type(state).__name__}."
      )
    slots = state.index.shape[1]
    if self.policy is not None and slots != self.policy.slots:
      raise ValueError(
        f"`state` must come from a memory with policy {self.policy}: got one "
        f"of {slots} slots."
      )
    levels = self.segments.levels(slots)
    got = 0 if state.levels is None else state.levels.pools.shape[1]
    if levels != got:
      raise ValueError(
        f"`state` must come from a memory with segments {self.segments}, with "
        f"{levels} writers of longer blocks: got {got}."
      )
    expected = jax.eval_shape(
      lambda params: self.empty_state(params, shape, batch, slots), params
    )
    _checks.check_state(state, expected)

  def step(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> CacheState:
    gates = {name: gate[:, None] for name, gate in gates.items()}
    tokens = Tokens(k[:, None], k[:, None], v[:, None], gates)
    return self.scan(params, state, tokens)[1]

  def inner_loss(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> Float[Array, "b n"] | None:
    """That of the memory of the current segment."""
    return self.memory.inner_loss(params, state.online, k, v, gates)

  def snapshot(self, state: State) -> State:
    return self.memory.snapshot(state.online)

  def read(
    self, params: Params, memory: State, q: Float[Array, "b t n k"]
  ) -> Float[Array, "b t n v"]:
    """Reads one memory, cached or online, by itself."""
    return self.memory.read(params, memory, q)

  def scan(
    self, params: Params, state: State | None, tokens: Tokens
  ) -> tuple[Float[Array, "b t n v"], CacheState]:
    """Writes and reads many tokens; see `Memory.scan`.

    With state None the returned one has room for the segments of this call
    and no more: start from `init_state` to go on.

    Tokens may be spread over devices, see `_over_devices`.
    """
    check_tokens(self, tokens)
    if sharding.spec_of(tokens.q)[1] is not None:
      return _over_devices.run(self, params, state, tokens)
    y, state, _ = self.inspect(params, state, tokens)
    return y, state

  def inspect(
    self, params: Params, state: CacheState | None, tokens: Tokens
  ) -> tuple[
    Float[Array, "b t n v"], CacheState, Float[Array, "b t n s_and_online"]
  ]:
    """Like `scan`, and returns the gates too.

    Returns:
      y, the state, and the weight with which every token reads each memory:
      those cached before the call, those of the segments of this call in order
      (0 where not readable), and last the online one. With a policy that takes
      turns: each place of the cache as it was then, and last the online one.
    """
    check_tokens(self, tokens)
    _layout.check_room(self, tokens)
    if state is not None:
      self.check_state(params, state, tokens.head_shape, tokens.q.shape[0])
    b, t = tokens.q.shape[:2]
    if t > 1 or tokens.starts is not None:
      _host.check_on_device(state, "read several tokens, or a new document")
    if t > 1 and self.policy is not None and self.policy.takes_turns:
      return _by_segment.run(self, params, state, tokens)
    if t > 1:
      return _segment_scan.run(self, params, state, tokens)
    if state is None:
      state = self.empty_state(params, tokens.head_shape, b, self.capacity(t))
    if t == 1:
      return _one_segment.run(self, params, state, tokens)
    slots = state.index.shape[1]
    weights = jnp.zeros((b, 0, tokens.q.shape[2], slots + 1), jnp.float32)
    return jnp.zeros_like(tokens.v), state, weights
