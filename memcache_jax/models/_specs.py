"""Which layer stands at a place of the pattern, as frozen data."""

from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import DType
from memcache_jax.layers import (
  Attention,
  MemoryAsContext,
  MemoryAsGate,
  MemoryMixer,
  Mixer,
)
from memcache_jax.memories import Memory
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class MemorySpec:
  """A `MemoryMixer` at a place of the layer pattern.

  Attributes:
    memory: any memory, cached or not.
    num_heads: heads.
    key_dim: width of queries and keys per head; dim / num_heads by default.
    value_dim: width of values per head; dim / num_heads by default.
    conv_width: tokens the short convolutions see.
  """

  memory: Memory
  num_heads: int
  key_dim: int | None = None
  value_dim: int | None = None
  conv_width: int = 4

  def __post_init__(self):
    if not isinstance(self.memory, Memory):
      raise ValueError(f"`memory` must be a Memory: got {self.memory!r}.")
    _checks.check_positive(num_heads=self.num_heads, conv_width=self.conv_width)
    _check_dims(key_dim=self.key_dim, value_dim=self.value_dim)

  def build(
    self,
    dim: int,
    *,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ) -> Mixer:
    """Makes the layer."""
    return MemoryMixer(
      dim,
      self.num_heads,
      self.memory,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
      conv_width=self.conv_width,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


@dataclass(frozen=True)
class AttentionSpec:
  """An `Attention` layer at a place of the layer pattern.

  Attributes:
    num_heads: heads.
    window: tokens seen; None for all.
    persistent_tokens: learned tokens that every token sees.
    head_dim: width per head; dim / num_heads by default.
    conv_width: tokens that short convolutions of q, k and v see; 1 for none.
  """

  num_heads: int
  window: int | None = None
  persistent_tokens: int = 0
  head_dim: int | None = None
  conv_width: int = 1

  def __post_init__(self):
    _checks.check_positive(num_heads=self.num_heads, conv_width=self.conv_width)
    _check_dims(window=self.window, head_dim=self.head_dim)

  def build(
    self,
    dim: int,
    *,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ) -> Mixer:
    """Makes the layer."""
    return Attention(
      dim,
      self.num_heads,
      window=self.window,
      persistent_tokens=self.persistent_tokens,
      head_dim=self.head_dim,
      conv_width=self.conv_width,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


@dataclass(frozen=True)
class MemoryAsGateSpec:
  """A `MemoryAsGate` at a place of the layer pattern.

  Attributes:
    memory: any memory, cached or not.
    num_heads: heads of attention and memory.
    window: tokens that attention sees.
    persistent_tokens: learned tokens that it always sees.
  """

  memory: Memory
  num_heads: int
  window: int = 2048
  persistent_tokens: int = 4

  def build(
    self,
    dim: int,
    *,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ) -> Mixer:
    """Makes the layer."""
    return MemoryAsGate(
      dim,
      self.num_heads,
      self.memory,
      window=self.window,
      persistent_tokens=self.persistent_tokens,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


@dataclass(frozen=True)
class MemoryAsContextSpec:
  """A `MemoryAsContext` at a place of the layer pattern.

  Attributes:
    memory: any memory that is not cached.
    num_heads: heads of attention and memory.
    segment_length: tokens that see one another.
    persistent_tokens: learned tokens that every token sees.
  """

  memory: Memory
  num_heads: int
  segment_length: int = 256
  persistent_tokens: int = 4

  def build(
    self,
    dim: int,
    *,
    out_scale: float = 1.0,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ) -> Mixer:
    """Makes the layer."""
    return MemoryAsContext(
      dim,
      self.num_heads,
      self.memory,
      segment_length=self.segment_length,
      persistent_tokens=self.persistent_tokens,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


def _check_dims(**dims: int | None) -> None:
  for name, value in dims.items():
    if value is not None:
      _checks.check_positive(**{name: value})


MixerSpec: TypeAlias = (
  MemorySpec | AttentionSpec | MemoryAsGateSpec | MemoryAsContextSpec
)
