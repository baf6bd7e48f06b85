"""What a model is, as frozen data: layer specs, sizes, presets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import DType
from memcache_jax.caching import Cached, Constant, GatedResidual
from memcache_jax.layers import Attention, MemoryMixer, Mixer
from memcache_jax.memories import (
  DecayedLinear,
  Linear,
  Memory,
  SlidingWindowLinear,
)
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
    head_dim: width per head; dim / num_heads by default.
  """

  num_heads: int
  window: int | None = None
  head_dim: int | None = None

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
      head_dim=self.head_dim,
      out_scale=out_scale,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )


MixerSpec: TypeAlias = MemorySpec | AttentionSpec


@dataclass(frozen=True)
class ModelConfig:
  """A language model of residual blocks.

  Attributes:
    vocab_size: token ids are 0 ... vocab_size - 1.
    dim: model width.
    num_layers: blocks, each a mixer and a feed-forward layer.
    pattern: mixers of successive blocks, repeated until there are
      `num_layers`. Repetitions are scanned, so that compile time depends on
      the length of the pattern and not on the number of layers.
    hidden_dim: of the feed-forward layers; 8 dim / 3 rounded up to a multiple
      of 256 by default.
    tie_embeddings: the output layer is the transposed embedding.
    dtype: compute dtype; logits, gates and recurrent state are float32.
    param_dtype: of the stored weights.
    remat: recompute each repetition of the pattern in the backward pass. A
      `jax.checkpoint_policies` policy says what to keep instead of nothing.
  """

  vocab_size: int
  dim: int
  num_layers: int
  pattern: tuple[MixerSpec, ...]
  hidden_dim: int | None = None
  tie_embeddings: bool = True
  dtype: DType = jnp.float32
  param_dtype: DType = jnp.float32
  remat: bool | Callable = False

  def __post_init__(self):
    _checks.check_positive(
      vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers
    )
    if self.hidden_dim is not None:
      _checks.check_positive(hidden_dim=self.hidden_dim)
    _checks.check_dtype(dtype=self.dtype, param_dtype=self.param_dtype)
    if not isinstance(self.pattern, tuple) or not all(
      isinstance(spec, MemorySpec | AttentionSpec) for spec in self.pattern
    ):
      raise ValueError(
        "`pattern` must be a tuple of MemorySpec and AttentionSpec: "
        f"got {self.pattern!r}."
      )
    if not self.pattern or self.num_layers % len(self.pattern):
      raise ValueError(
        "`num_layers` must be a multiple of the length of `pattern`: "
        f"got num_layers={self.num_layers}, {len(self.pattern)} in pattern."
      )

  @property
  def repeats(self) -> int:
    """How often the pattern is repeated."""
    return self.num_layers // len(self.pattern)

  @classmethod
  def tiny(
    cls, *mixers: MixerSpec, vocab_size: int = 256, repeats: int = 1
  ) -> "ModelConfig":
    """A model for tests and laptops: width 32, two cached memories."""
    if not mixers:
      cached = Cached(Linear(), Constant(16), GatedResidual())
      mixers = (MemorySpec(cached, num_heads=2),) * 2
    return cls(
      vocab_size=vocab_size,
      dim=32,
      num_layers=repeats * len(mixers),
      pattern=mixers,
      hidden_dim=64,
    )

  @classmethod
  def memory_caching_760m(cls, memory: Memory | None = None) -> "ModelConfig":
    """The 760M shape of Memory Caching (arXiv 2602.24281), Table 6.

    Args:
      memory: of every block; by default sliding-window linear attention with
        gated residual caching every 256 tokens.
    """
    return _size_760m(MemorySpec(memory or _paper_memory(), num_heads=16))

  @classmethod
  def memory_caching_1_3b(cls, memory: Memory | None = None) -> "ModelConfig":
    """The 1.3B shape of Memory Caching (arXiv 2602.24281), Table 6.

    Args:
      memory: of every block; by default sliding-window linear attention with
        gated residual caching every 256 tokens.
    """
    return _size_1_3b(MemorySpec(memory or _paper_memory(), num_heads=8))

  @classmethod
  def transformer_760m(cls) -> "ModelConfig":
    """Transformer++ at the 760M shape: full attention, RoPE, SwiGLU."""
    return _size_760m(AttentionSpec(num_heads=16))

  @classmethod
  def transformer_1_3b(cls) -> "ModelConfig":
    """Transformer++ at the 1.3B shape: full attention, RoPE, SwiGLU."""
    return _size_1_3b(AttentionSpec(num_heads=8))

  @classmethod
  def samba_760m(cls) -> "ModelConfig":
    """Mamba-2 memories and attention windows of 2048 in turn.

    The order of Samba (arXiv 2406.07522), with the memory of this library in
    place of Mamba's block.
    """
    return _size_760m(
      MemorySpec(DecayedLinear.mamba2(), num_heads=16),
      AttentionSpec(num_heads=16, window=2048),
    )


def _paper_memory() -> Memory:
  return Cached(SlidingWindowLinear(), Constant(256), GatedResidual())


def _size_760m(*pattern: MixerSpec) -> ModelConfig:
  return ModelConfig(
    vocab_size=32_000,
    dim=1536,
    num_layers=24,
    pattern=pattern,
    dtype=jnp.bfloat16,
    remat=True,
  )


def _size_1_3b(*pattern: MixerSpec) -> ModelConfig:
  return ModelConfig(
    vocab_size=32_000,
    dim=2048,
    num_layers=18,
    pattern=pattern,
    dtype=jnp.bfloat16,
    remat=True,
  )
