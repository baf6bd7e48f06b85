"""Matrix memories written by outer products: linear, decayed, windowed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax import ops, token_layout
from memcache_jax.array_typing import Array, Bool, Float, Gates, Params, State
from memcache_jax.memories._base import Gate, HeadShape, Tokens, check_tokens
from memcache_jax.memories._matrix import MatrixMemory
from memcache_jax.ops import LinearAttentionState, _checks
from memcache_jax.ops._dispatch import of_op
from memcache_jax.ops.cached_linear_attention import has_kernel


class _LinearMemory(MatrixMemory):
  """A matrix memory that `linear_attention` writes."""

  def _write_window(self) -> int:
    return 1

  def _log_decay_and_write(self, gates: Gates, num_heads: int):
    """The op's `log_decay` [b t n] and `write` [b t n w], either None."""
    raise NotImplementedError

  def init_state(
    self,
    params: Params,
    shape: HeadShape,
    batch: int,
    *,
    max_length: int | None = None,
  ) -> LinearAttentionState:
    del params, max_length
    n, k, v = shape
    matrix = jnp.zeros((batch, n, k, v), jnp.float32)
    tail = self._write_window() - 1
    if tail == 0:
      return LinearAttentionState(matrix)
    return LinearAttentionState(
      matrix,
      jnp.zeros((batch, tail, n, k), jnp.float32),
      jnp.zeros((batch, tail, n, v), jnp.float32),
    )

  def snapshot(self, state: State) -> Float[Array, "b n k v"]:
    return state.matrix

  def scan(
    self, params: Params, state: State | None, tokens: Tokens
  ) -> tuple[Float[Array, "b t n v"], LinearAttentionState]:
    del params
    check_tokens(self, tokens)
    log_decay, write = self._gates_of(tokens)
    return ops.linear_attention(
      tokens.q,
      tokens.k,
      tokens.v,
      log_decay=log_decay,
      write=write,
      state=state,
      mask=tokens.mask,
      starts=tokens.starts,
      chunk_size=self.chunk_size,
      implementation=of_op(self.implementation),
    )

  def _gates_of(self, tokens):
    log_decay, write = self._log_decay_and_write(
      tokens.gates, tokens.q.shape[-2]
    )
    if log_decay is not None and log_decay.ndim == 1:
      log_decay = jnp.broadcast_to(log_decay, tokens.q.shape[:-1])
    return log_decay, write

  def scans_segments(self, tokens: Tokens, carried: int) -> bool:
    _, g, c, _, k = tokens.q.shape
    return self._write_window() == 1 and has_kernel(
      k,
      tokens.v.shape[-1],
      tokens.q.dtype.name,
      segment_length=c,
      segments=g,
      carried=carried + 1,
      implementation=self.implementation,
    )

  def scan_segments(
    self,
    params: Params,
    state: State | None,
    tokens: Tokens,
    memories: State | None,
    weights: Float[Array, "b g c n s"],
    own_weight: Float[Array, "b g c n"],
    fresh: Bool[Array, "b g"] | None,
    write_mode: Literal["independent", "checkpoint"],
  ) -> tuple[Float[Array, "b g c n v"], State]:
    del params
    log_decay, write = self._gates_of(tokens)
    write = None if write is None else write[..., 0]
    arrays = (tokens.q, tokens.k, tokens.v, weights, own_weight)
    arrays = (*arrays, log_decay, write)
    g, c = tokens.q.shape[1:3]
    join = lambda x: rearrange(x, "b g c ... -> b (g c) ...")
    arrays = jax.tree.map(join, arrays)
    if tokens.mask is not None:
      arrays = token_layout.zero_masked(arrays, join(tokens.mask))
    *arrays, log_decay, write = arrays
    y, ends = ops.cached_linear_attention(
      *arrays,
      segment_length=c,
      log_decay=log_decay,
      write=write,
      memories=memories,
      state=None if state is None else state.matrix,
      fresh=fresh,
      write_mode=write_mode,
      chunk_size=self.chunk_size,
      implementation=self.implementation,
    )
    y = rearrange(y, "b (g c) n v -> b g c n v", g=g)
    return y, LinearAttentionState(ends)


@dataclass(frozen=True)
class Linear(_LinearMemory):
  r"""Linear attention: ``S_t = S_{t-1} + k_t^T v_t``, ``y_t = q_t S_t``.

  Memory Caching (arXiv 2602.24281), section 4.3; without normaliser, which
  the layer's output norm replaces. The initial memory is zero.

  Example:
    >>> from memcache_jax.memories import Linear
    >>> Linear().gates()
    {}
  """

  def _log_decay_and_write(self, gates, num_heads):
    del gates, num_heads
    return None, None


@dataclass(frozen=True, kw_only=True)
class DecayedLinear(_LinearMemory):
  r"""Linear attention that forgets: ``S_t = a_t S_{t-1} + b_t k_t^T v_t``.

  Mamba-2 (arXiv 2405.21060), Eq. 16, and RetNet (arXiv 2307.08621), Eq. 5-7,
  are its presets.

  Attributes:
    decay: "learned": one a_t per token and head, gate "log_decay". "fixed":
      ``a = 1 - 2^(-5 - head)``, RetNet's constants.
    write: "one": b_t = 1. "sigmoid": gate "write" in (0, 1). "dt": gate
      "write" is the time step that also sets the decay, as in Mamba-2.

  Example:
    >>> from memcache_jax.memories import DecayedLinear
    >>> sorted(DecayedLinear.mamba2().gates())
    ['log_decay', 'write']
  """

  decay: Literal["learned", "fixed"] = "learned"
  write: Literal["one", "sigmoid", "dt"] = "one"

  def __post_init__(self):
    super().__post_init__()
    _checks.check_choice(decay=(self.decay, ("learned", "fixed")))
    _checks.check_choice(write=(self.write, ("one", "sigmoid", "dt")))
    if self.write == "dt" and self.decay != "learned":
      raise ValueError(
        "`write` 'dt' is the time step of a learned decay: "
        f"got decay={self.decay!r}."
      )

  @classmethod
  def retnet(cls) -> "DecayedLinear":
    """RetNet's retention: constant decay per head, unit writes."""
    return cls(decay="fixed")

  @classmethod
  def mamba2(cls) -> "DecayedLinear":
    """Mamba-2's state space: the time step sets decay and write strength."""
    return cls(write="dt")

  def gates(self) -> Mapping[str, Gate]:
    gates = {}
    if self.decay == "learned":
      gates["log_decay"] = Gate("log_decay")
    if self.write != "one":
      gates["write"] = Gate(self.write)
    return gates

  def _log_decay_and_write(self, gates, num_heads):
    if self.decay == "fixed":
      head = jnp.arange(num_heads, dtype=jnp.float32)
      log_decay = jnp.log1p(-jnp.exp2(-5.0 - head))
    else:
      log_decay = gates["log_decay"]
    write = None if self.write == "one" else gates["write"][..., None]
    return log_decay, write


@dataclass(frozen=True)
class SlidingWindowLinear(_LinearMemory):
  r"""SWLA: every token is written again by the following steps.

  .. math::
    S_t = a_t S_{t-1} + \sum_{o=0}^{w-1} \beta_{t,o}\, k_{t-o}^T v_{t-o},
    \qquad y_t = q_t S_t

  Memory Caching (arXiv 2602.24281), Eq. 26-28, in row vectors. A window does
  not reach over a document start, nor over a segment start when segments are
  written independently.

  Attributes:
    window: tokens written at each step, w; the paper's tables use 2.

  Example:
    >>> from memcache_jax.memories import SlidingWindowLinear
    >>> SlidingWindowLinear(window=2).gates()["write"].width
    2
  """

  window: int = 2

  def __post_init__(self):
    super().__post_init__()
    _checks.check_positive(window=self.window)

  def gates(self) -> Mapping[str, Gate]:
    # The token itself starts strong (0.88), older ones weak (0.12).
    bias = (2.0,) + (-2.0,) * (self.window - 1)
    return {
      "log_decay": Gate("log_decay"),
      "write": Gate("sigmoid", width=self.window, bias=bias),
    }

  def _write_window(self) -> int:
    return self.window

  def _log_decay_and_write(self, gates, num_heads):
    del num_heads
    return gates["log_decay"], gates["write"]
