"""What a memory is: the protocol, and a slow default for everything in it."""

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar

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
from memcache_jax.memories._axes import param_axes, state_axes, token_axes
from memcache_jax.memories._gate import Gate, HeadShape
from memcache_jax.memories._scan_tokens import scan_tokens
from memcache_jax.memories._tokens import Tokens, check_tokens
from memcache_jax.ops import _checks
from memcache_jax.ops.cache_read import read_one_token

# All that caching knows of memories.
__all__ = [
  "Gate",
  "HeadShape",
  "Memory",
  "Tokens",
  "check_tokens",
  "param_axes",
  "state_axes",
  "token_axes",
]


class Memory:
  """A recurrent memory: a rule for writing keys and values, and reading.

  Subclass it as a frozen dataclass that holds options only (no arrays, no
  sizes), and define `init_state`, `step` and `read`; everything else then
  works, token by token. Overriding `scan` makes it fast. All state is
  explicit, float32, and has the batch axis first.

  Attributes:
    reads_linearly: reading is linear in what `snapshot` returns, so that a
      mix of memories reads like the mix of their reads.
    spreads_tokens: `scan` takes tokens of one sequence on several devices.
  """

  reads_linearly: ClassVar[bool] = False
  spreads_tokens: ClassVar[bool] = False

  @property
  def uses_segment_ends(self) -> bool:
    """Whether `Tokens.segment_ends` means anything to it."""
    return False

  @property
  def closes_after_reading(self) -> bool:
    """Whether `scan` may change the memory after its newest token was read.

    False for most: tokens read ``read(snapshot(state))``. True where weights
    are normalised at the end of an inner batch, after its last token's read,
    and where tokens read the weights from before their batch.
    """
    return False

  def gates(self) -> Mapping[str, Gate]:
    """The gates the memory wants for every token, by name."""
    return {}

  def init_params(self, key: PRNGKeyArray, shape: HeadShape) -> Params:
    """Learned parameters, shared by all rows; leaves [n ...]."""
    del key, shape
    return {}

  def init_state(
    self,
    params: Params,
    shape: HeadShape,
    batch: int,
    *,
    max_length: int | None = None,
  ) -> State:
    """The state before the first token; leaves [b ...].

    Args:
      params: what `init_params` returned, possibly trained.
      shape: sizes of the heads.
      batch: rows.
      max_length: most tokens of one document that the state must have room
        for. Only memories that grow use it, see `scan`.
    """
    raise _undefined(self, "init_state")

  def check_state(
    self, params: Params, state: State, shape: HeadShape, batch: int
  ) -> None:
    """Raises ValueError unless a state is one of this memory, for such rows."""

    def expected(max_length):
      return jax.eval_shape(
        lambda params: self.init_state(
          params, shape, batch, max_length=max_length
        ),
        params,
      )

    _checks.check_state(state, expected(1), expected(2**20))

  def step(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> State:
    """Writes one token; returns a state like the one it was given."""
    raise _undefined(self, "step")

  def read(
    self, params: Params, memory: State, q: Float[Array, "b t n k"]
  ) -> Float[Array, "b t n v"]:
    """Reads what `snapshot` returned, at any number of queries."""
    raise _undefined(self, "read")

  def snapshot(self, state: State) -> State:
    """The part of the state that is cached and read; leaves [b n ...]."""
    return state

  def inner_loss(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> Float[Array, "b n"] | None:
    """What the memory minimises, for the next token; None: nothing.

    It is taken at the weights at which `step` would take its gradient.
    """
    del params, state, k, v, gates
    return None

  def scan(
    self, params: Params, state: State | None, tokens: Tokens
  ) -> tuple[Float[Array, "b t n v"], State]:
    """Writes and reads many tokens; each is read after it was written.

    A memory whose states grow with `max_length` must override it, and cannot
    be cached: a new document needs a state of the size of the one before.

    Args:
      params: what `init_params` returned, possibly trained.
      state: what an earlier call returned, or None for a new sequence.
      tokens: what to write and read.

    Returns:
      y in the dtype of v, and the state after the last token.
    """
    return scan_tokens(self, params, state, tokens)

  def read_many(
    self,
    params: Params,
    memories: State,
    q: Float[Array, "b t n k"],
    weights: Float[Array, "b t n s"],
  ) -> Float[Array, "b t n v"]:
    """Sum of the reads of stored memories [b s n ...], gated; float32."""
    read = functools.partial(self.read, params)
    if q.shape[1] == 1:
      return read_one_token(read, memories, q, weights)

    def add(y, inputs):
      memory, weight = inputs
      return y + weight[..., None] * read(memory, q).astype(jnp.float32), None

    memories = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), memories)
    weights = jnp.moveaxis(weights, -1, 0)
    first = jax.tree.map(lambda x: x[0], memories)
    out = jax.eval_shape(read, first, q)
    zero = sharding.zeros_at_tokens(q, out.shape[-1])
    return jax.lax.scan(jax.checkpoint(add), zero, (memories, weights))[0]

  def read_selected(
    self,
    params: Params,
    memories: State,
    q: Float[Array, "b t n k"],
    index: Int[Array, "b t n r"],
    weights: Float[Array, "b t n r"],
    in_tiles: Callable[..., Float[Array, "b t n v"]],
  ) -> Float[Array, "b t n v"]:
    """Like `read_many`, of a few memories per token, -1 for none.

    `in_tiles` does it by reads of one memory each: a function of `read`, or one
    like it, params, q, memories, index and weights.
    """
    return in_tiles(self.read, params, q, memories, index, weights)

  def scans_segments(self, tokens: Tokens, carried: int) -> bool:
    """Whether `scan_segments` takes such tokens [b g c ...], and is faster.

    `carried` is the number of memories stored before the call.
    """
    del tokens, carried
    return False

  def scan_segments(
    self,
    params: Params,
    state: State | None,
    tokens: Tokens,
    memories: State | None,
    weights: Float[Array, "b g c n s"],
    own_weight: Float[Array, "b g c n"],
    fresh: Bool[Array, "b g"] | None,
    write_mode: str,
  ) -> tuple[Float[Array, "b g c n v"], State]:
    """Writes and reads all segments of a call in one pass.

    Args:
      params: what `init_params` returned, possibly trained.
      state: with which the first segment goes on; None for a new sequence.
      tokens: by segments [b g c ...], with a mask of the places in use.
      memories: stored before the call [b s n ...], or None.
      weights: gates of these, then of the ends of the call's segments.
      own_weight: gate of the online memory.
      fresh: segments at which a document starts.
      write_mode: as in `Cached`.

    Returns:
      The gated reads and the states at the ends of the segments [b g ...].
    """
    raise NotImplementedError

  def scan_soup(
    self,
    params: Params,
    state: State | None,
    tokens: Tokens,
    memories: State,
    weights: Float[Array, "b t n s"],
    own_weight: Float[Array, "b t n"],
  ) -> tuple[Float[Array, "b t n v"], State]:
    """Like `scan`, but reads a mix of parameters (Memory Soup).

    For every token the stored memories [b s n ...] and the online one are
    averaged with the weights, parameter by parameter, and the average is read
    once: Memory Caching (arXiv 2602.24281), Eq. 14-15.
    """

    def read(state, q, index):
      weight = jnp.take(weights, index, axis=1)
      own = jnp.take(own_weight, index, axis=1)

      def mix(stored, online):
        axes = "abcdefgh"[: online.ndim - 2]
        mixed = jnp.einsum(f"zns,zsn{axes}->zn{axes}", weight, stored)
        return mixed + own.reshape(own.shape + (1,) * len(axes)) * online

      soup = jax.tree.map(mix, memories, self.snapshot(state))
      return self.read(params, soup, q)

    return scan_tokens(self, params, state, tokens, read)


def _undefined(memory: Memory, method: str) -> NotImplementedError:
  return NotImplementedError(f"{type(memory).__name__} must define `{method}`.")
