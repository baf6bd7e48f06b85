"""What a model is, as frozen data: sizes and presets."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import DType
from memcache_jax.caching import Cached, Constant, GatedResidual
from memcache_jax.memories import (
  RWKV7,
  DecayedLinear,
  Delta,
  Linear,
  Memory,
)
from memcache_jax.models._specs import (
  AttentionSpec,
  MemoryAsContextSpec,
  MemoryAsGateSpec,
  MemorySpec,
  MixerSpec,
)
from memcache_jax.ops import _checks


@dataclass(frozen=True)
class Size:
  """What all models of a comparison share; the presets take it.

  Attributes:
    dim: model width.
    num_layers: blocks.
    num_heads: heads of every mixer.
    hidden_dim: of the feed-forward layers; None for what the preset says.
    vocab_size: of the token ids.
    tie_embeddings: whether the output layer is the transposed embedding.
    dtype: compute dtype.
    remat: see `ModelConfig`.
  """

  dim: int
  num_layers: int
  num_heads: int
  hidden_dim: int | None = None
  vocab_size: int = 32_000
  tie_embeddings: bool = True
  dtype: DType = jnp.bfloat16
  remat: bool | Callable = True

  @classmethod
  def paper_760m(cls) -> "Size":
    """The 760M shape of Memory Caching (arXiv 2602.24281), Table 6."""
    return cls(dim=1536, num_layers=24, num_heads=16)

  @classmethod
  def paper_1_3b(cls) -> "Size":
    """The 1.3B shape of Memory Caching (arXiv 2602.24281), Table 6."""
    return cls(dim=2048, num_layers=18, num_heads=8)


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
      Its names are "reads", what attention and memories returned,
      "segment_ends", what segments of cached memories left, and "batch_starts",
      from which inner batches of memories that are networks are done anew: with
      all three, none of these is run as a whole again.
    activations: how the residual stream (b t d) lies over the axes of the mesh
      in use. It is held so between blocks, which makes the compiler gather
      weights that are spread over devices, and never the stream. None: as the
      compiler likes.
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
  activations: jax.P | None = None

  def __post_init__(self):
    _checks.check_positive(
      vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers
    )
    if self.hidden_dim is not None:
      _checks.check_positive(hidden_dim=self.hidden_dim)
    _checks.check_dtype(dtype=self.dtype, param_dtype=self.param_dtype)
    if not isinstance(self.tie_embeddings, bool):
      raise ValueError(
        f"`tie_embeddings` must be a bool: got {self.tie_embeddings!r}."
      )
    if not isinstance(self.remat, bool) and not callable(self.remat):
      raise ValueError(
        f"`remat` must be a bool or a policy: got {self.remat!r}."
      )
    if not isinstance(self.pattern, tuple) or not all(
      isinstance(spec, MixerSpec) for spec in self.pattern
    ):
      raise ValueError(
        "`pattern` must be a tuple of specs of mixers, such as MemorySpec: "
        f"got {self.pattern!r}."
      )
    if not isinstance(self.activations, jax.P | None):
      raise ValueError(
        "`activations` must be a jax.P of up to three axes, or None: got "
        f"{self.activations!r}."
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
  def transformer(cls, size: Size) -> "ModelConfig":
    """Transformer++: full attention, RoPE, SwiGLU, RMSNorm."""
    return _sized(size, AttentionSpec(size.num_heads))

  @classmethod
  def samba(cls, size: Size, window: int = 2048) -> "ModelConfig":
    """Mamba-2 memories and attention windows in turn.

    The order of Samba (arXiv 2406.07522), with the memory of this library in
    place of Mamba's block.

    Args:
      size: what all models of a comparison share.
      window: tokens that attention sees.
    """
    return _sized(
      size,
      MemorySpec(DecayedLinear.mamba2(), size.num_heads),
      AttentionSpec(size.num_heads, window=window),
    )

  @classmethod
  def retnet(cls, size: Size) -> "ModelConfig":
    """RetNet's retention: constant decays, values twice as wide.

    Retentive Network (arXiv 2307.08621), with half the feed-forward width, as
    there; in the block of `MemoryMixer`, which has short convolutions and unit
    keys in place of rotary positions.
    """
    value_dim = 2 * size.dim // size.num_heads
    spec = MemorySpec(
      DecayedLinear.retnet(), size.num_heads, value_dim=value_dim
    )
    hidden_dim = size.hidden_dim
    if hidden_dim is None:
      hidden_dim = -(-4 * size.dim // (3 * 256)) * 256
    return _sized(replace(size, hidden_dim=hidden_dim), spec)

  @classmethod
  def deltanet(cls, size: Size) -> "ModelConfig":
    """DeltaNet (arXiv 2406.06484): the delta rule in every block."""
    return cls.recurrent(size, Delta())

  @classmethod
  def rwkv7(cls, size: Size) -> "ModelConfig":
    """The memory of RWKV-7 (arXiv 2503.14456), with its heads of width 64.

    In the block of `MemoryMixer`; RWKV-7's own has token shifts, gates of low
    rank and an ungated feed-forward layer.
    """
    heads = max(1, size.dim // 64)
    return _sized(size, MemorySpec(RWKV7(), heads))

  @classmethod
  def recurrent(cls, size: Size, memory: Memory) -> "ModelConfig":
    """One memory in every block, cached or not.

    With `SlidingWindowLinear`, `DeepLinear`, `Titans` or `Memora`, bare or in
    `Cached`, these are the models of Memory Caching (arXiv 2602.24281),
    Table 1.

    Args:
      size: what all models of a comparison share.
      memory: of every block.

    Example:
      >>> from memcache_jax.caching import Cached, Constant, GatedResidual
      >>> from memcache_jax.memories import Titans
      >>> from memcache_jax.models import ModelConfig, Size
      >>> memory = Cached(Titans(), Constant(256), GatedResidual())
      >>> config = ModelConfig.recurrent(Size.paper_760m(), memory)
      >>> config.num_layers, config.dim
      (24, 1536)
    """
    return _sized(size, MemorySpec(memory, size.num_heads))

  @classmethod
  def titans_mac(
    cls, size: Size, memory: Memory, segment_length: int = 256
  ) -> "ModelConfig":
    """Titans' memory as context (arXiv 2501.00663), section 4.1.

    Args:
      size: what all models of a comparison share.
      memory: one that is not cached.
      segment_length: tokens that attend to one another.
    """
    return _sized(
      size, MemoryAsContextSpec(memory, size.num_heads, segment_length)
    )

  @classmethod
  def titans_mag(
    cls, size: Size, memory: Memory, window: int = 2048
  ) -> "ModelConfig":
    """Titans' memory as gate (arXiv 2501.00663), section 4.2.

    Args:
      size: what all models of a comparison share.
      memory: cached or not.
      window: tokens that attention sees.
    """
    return _sized(size, MemoryAsGateSpec(memory, size.num_heads, window))

  @classmethod
  def titans_mal(
    cls, size: Size, memory: Memory, window: int = 2048
  ) -> "ModelConfig":
    """Titans' memory as layer (arXiv 2501.00663), section 4.3.

    Memories and attention windows in turn, each in a block of its own, with
    persistent tokens before the windows; a baseline of Memory Caching
    (arXiv 2602.24281), Table 3.

    Args:
      size: what all models of a comparison share.
      memory: cached or not.
      window: tokens that attention sees.
    """
    n = size.num_heads
    attention = AttentionSpec(n, window=window, persistent_tokens=4)
    return _sized(size, MemorySpec(memory, n), attention)


def _sized(size: Size, *pattern: MixerSpec) -> ModelConfig:
  return ModelConfig(
    vocab_size=size.vocab_size,
    dim=size.dim,
    num_layers=size.num_layers,
    pattern=pattern,
    hidden_dim=size.hidden_dim,
    tie_embeddings=size.tie_embeddings,
    dtype=size.dtype,
    remat=size.remat,
  )
