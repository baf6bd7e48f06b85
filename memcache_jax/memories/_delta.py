"""Matrix memories that replace what they hold: the delta rules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Params, PRNGKeyArray, State
from memcache_jax.memories._base import Gate, HeadShape, Tokens, check_tokens
from memcache_jax.memories._matrix import MatrixMemory
from memcache_jax.ops import _checks
from memcache_jax.ops._dispatch import of_op
from memcache_jax.ops.delta_rule import delta_rule
from memcache_jax.ops.diagonal_delta_rule import diagonal_delta_rule

_INITIAL_SCALE = 0.02


@dataclass(frozen=True)
class _DeltaMemory(MatrixMemory):
  """A matrix memory whose writes depend on what it holds.

  Attributes:
    initial: the memory of a new document, zero or a parameter per head.
  """

  initial: Literal["zero", "learned"] = "zero"

  def __post_init__(self):
    super().__post_init__()
    _checks.check_choice(initial=(self.initial, ("zero", "learned")))

  def init_params(self, key: PRNGKeyArray, shape: HeadShape) -> Params:
    if self.initial == "zero":
      return {}
    return {"w": _INITIAL_SCALE * jax.random.normal(key, shape, jnp.float32)}

  def init_state(
    self,
    params: Params,
    shape: HeadShape,
    batch: int,
    *,
    max_length: int | None = None,
  ) -> Float[Array, "b n k v"]:
    del max_length
    matrix = jnp.zeros((batch, *shape), jnp.float32)
    if self.initial == "zero":
      return matrix
    return matrix + params["w"].astype(jnp.float32)[None]

  def scan(
    self, params: Params, state: State | None, tokens: Tokens
  ) -> tuple[Float[Array, "b t n v"], Float[Array, "b n k v"]]:
    check_tokens(self, tokens)
    return self._write_and_read(
      tokens,
      {
        "state": state,
        "initial": params["w"] if self.initial == "learned" else None,
        "mask": tokens.mask,
        "starts": tokens.starts,
        "chunk_size": self.chunk_size,
      },
    )

  def _write_and_read(self, tokens: Tokens, options: dict[str, Any]):
    """Calls the op with the gates it wants."""
    raise NotImplementedError


@dataclass(frozen=True)
class Delta(_DeltaMemory):
  r"""DeltaNet: ``S_t = S_{t-1} + beta_t k_t^T (v_t - k_t S_{t-1})``.

  DeltaNet (arXiv 2406.06484), section 2.2, in row vectors: one step of
  gradient descent on ``|k_t S - v_t|^2 / 2``. Keys should have unit length.

  Attributes:
    max_beta: upper limit of the write strength. Above 1, up to 2, a write may
      flip the sign of what the memory holds for a key, which lets it track
      states (arXiv 2411.12537).

  Example:
    >>> from memcache_jax.memories import Delta
    >>> Delta(max_beta=2.0).gates()["beta"].scale
    2.0
  """

  max_beta: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    beta = self.max_beta
    if not isinstance(beta, int | float) or not 0.0 < beta <= 2.0:
      raise ValueError(f"`max_beta` must be a number in (0, 2]: got {beta!r}.")

  def gates(self) -> Mapping[str, Gate]:
    return {"beta": Gate("sigmoid", scale=self.max_beta)}

  def _write_and_read(self, tokens, options):
    return delta_rule(
      tokens.q,
      tokens.k,
      tokens.v,
      tokens.gates["beta"],
      log_decay=tokens.gates.get("log_decay"),
      implementation=of_op(self.implementation, "mosaic_tpu", "triton"),
      **options,
    )


@dataclass(frozen=True)
class GatedDelta(Delta):
  r"""Gated DeltaNet: a delta rule that forgets first.

  .. math:: S_t = a_t S_{t-1} + \beta_t k_t^T (v_t - a_t k_t S_{t-1})

  Gated DeltaNet (arXiv 2412.06464), section 3.1, in row vectors. Keys should
  have unit length.

  Example:
    >>> from memcache_jax.memories import GatedDelta
    >>> sorted(GatedDelta().gates())
    ['beta', 'log_decay']
  """

  def gates(self) -> Mapping[str, Gate]:
    return {"log_decay": Gate("log_decay"), **super().gates()}


@dataclass(frozen=True, kw_only=True)
class RWKV7(_DeltaMemory):
  r"""RWKV-7: decays each key channel, removes along one key, adds another.

  .. math::
    S_t = \mathrm{diag}(w_t) S_{t-1}
      - (\eta_t \odot \kappa_t)^T (\kappa_t S_{t-1}) + k_t^T v_t

  RWKV-7 (arXiv 2503.14456), section 4, in row vectors. This is the memory of
  that model only, not its block.

  Example:
    >>> from memcache_jax.memories import RWKV7
    >>> sorted(RWKV7().gates())
    ['log_decay', 'rate', 'removal_key']
  """

  chunk_size: int = 32

  def gates(self) -> Mapping[str, Gate]:
    return {
      # Between -exp(-1/2) and 0, so that no channel forgets faster than
      # 0.545 a token.
      "log_decay": Gate("sigmoid", width="key", scale=-math.exp(-0.5)),
      "rate": Gate("sigmoid", width="key"),
      "removal_key": Gate("direction"),
    }

  def _write_and_read(self, tokens, options):
    q, k, v, gates = tokens.q, tokens.k, tokens.v, tokens.gates
    return diagonal_delta_rule(
      q,
      k,
      v,
      gates["log_decay"],
      gates["removal_key"],
      gates["rate"],
      implementation=of_op(self.implementation),
      **options,
    )
