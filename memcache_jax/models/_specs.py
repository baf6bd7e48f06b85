"""Which layer stands at a place of the pattern, as frozen data."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

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
class MixerSpec:
  """A layer at a place of the layer pattern; its fields are options of it.

  Attributes:
    layer: the class, which takes the model width and all fields by name.
  """

  layer: ClassVar[Callable[..., Mixer]]

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
    names = [field.name for field in dataclasses.fields(self)]
    options: dict[str, Any] = {name: getattr(self, name) for name in names}
    return self.layer(
      dim=dim,
      **options,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


@dataclass(frozen=True)
class MemorySpec(MixerSpec):
  """A `MemoryMixer` at a place of the layer pattern.

  Attributes:
    memory: any memory, cached or not.
    num_heads: heads.
    key_dim: width of queries and keys per head; dim / num_heads by default.
    value_dim: width of values per head; dim / num_heads by default.
    conv_width: tokens the short convolutions see.
  """

  layer = MemoryMixer
  memory: Memory
  num_heads: int
  key_dim: int | None = None
  value_dim: int | None = None
  conv_width: int = 4

  def __post_init__(self):
    _check_memory(self.memory)
    _checks.check_positive(num_heads=self.num_heads, conv_width=self.conv_width)
    _check_if_given(key_dim=self.key_dim, value_dim=self.value_dim)


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
  """An `Attention` layer at a place of the layer pattern.

  Attributes:
    num_heads: heads.
    window: tokens seen; None for all.
    persistent_tokens: learned tokens that every token sees.
    head_dim: width per head; dim / num_heads by default.
    conv_width: tokens that short convolutions of q, k and v see; 1 for none.
  """

  layer = Attention
  num_heads: int
  window: int | None = None
  persistent_tokens: int = 0
  head_dim: int | None = None
  conv_width: int = 1

  def __post_init__(self):
    _checks.check_positive(num_heads=self.num_heads, conv_width=self.conv_width)
    _check_if_given(window=self.window, head_dim=self.head_dim)
    _check_if_any(persistent_tokens=self.persistent_tokens)


@dataclass(frozen=True)
class MemoryAsGateSpec(MixerSpec):
  """A `MemoryAsGate` at a place of the layer pattern.

  Attributes:
    memory: any memory, cached or not.
    num_heads: heads of attention and memory.
    window: tokens that attention sees.
    persistent_tokens: learned tokens that it always sees.
  """

  layer = MemoryAsGate
  memory: Memory
  num_heads: int
  window: int = 2048
  persistent_tokens: int = 4

  def __post_init__(self):
    _check_memory(self.memory)
    _checks.check_positive(num_heads=self.num_heads, window=self.window)
    _check_if_any(persistent_tokens=self.persistent_tokens)


@dataclass(frozen=True)
class MemoryAsContextSpec(MixerSpec):
  """A `MemoryAsContext` at a place of the layer pattern.

  Attributes:
    memory: any memory that is not cached.
    num_heads: heads of attention and memory.
    segment_length: tokens that see one another.
    persistent_tokens: learned tokens that every token sees.
  """

  layer = MemoryAsContext
  memory: Memory
  num_heads: int
  segment_length: int = 256
  persistent_tokens: int = 4

  def __post_init__(self):
    _check_memory(self.memory)
    _checks.check_positive(
      num_heads=self.num_heads, segment_length=self.segment_length
    )
    _check_if_any(persistent_tokens=self.persistent_tokens)


def _check_memory(memory: Any) -> None:
  if not isinstance(memory, Memory):
    raise ValueError(f"`memory` must be a Memory: got {memory!r}.")


def _check_if_given(**sizes: int | None) -> None:
  given = {name: size for name, size in sizes.items() if size is not None}
  _checks.check_positive(**given)


def _check_if_any(**counts: int) -> None:
  """0 is none of them."""
  _checks.check_positive(**{name: x for name, x in counts.items() if x != 0})
