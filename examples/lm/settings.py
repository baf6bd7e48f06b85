"""What a run is. Config files make these; nothing else reads a ConfigDict."""

import dataclasses
from dataclasses import asdict, dataclass, field
from typing import Any

from ml_collections import ConfigDict

from examples.workdir import InputError

# What may differ between two sessions of one run.
FREE = (
  "mesh",
  "log_every",
  "save_every",
  "evaluate_every",
  "evaluation_batches",
  "keep",
  "prefetch",
  "watch_tokens",
  "profile_steps",
)


@dataclass(frozen=True)
class ModelSettings:
  """See `examples.lm.model` for what the names mean.

  Attributes:
    family: transformer, samba, retnet, deltanet, rwkv7, memora, swla, dla,
      titans, titans_mac, titans_mag or titans_mal.
    caching: none, log, grm, soup or ssc; none for transformer, samba, retnet,
      deltanet, rwkv7 and titans_mac.
    dim: model width.
    num_layers: blocks.
    num_heads: heads per mixer.
    hidden_dim: of the feed-forward layers; 0 for what the family says.
    vocab_size: at least that of the tokenizer.
    segment_length: tokens per cached memory; with titans_mac, tokens that
      attend to one another.
    window: tokens that attention sees in samba, titans_mag and titans_mal.
    inner_batch: tokens whose inner gradient is taken at the same weights, in
      memories that are networks.
    max_kept_bytes: of the weights of such a memory, kept per layer for the
      backward pass; what is beyond is computed again.
    top_k: cached memories a token reads, with ssc.
    write_mode: of cached memories, independent or checkpoint.
    tie_embeddings: whether the output layer is the transposed embedding.
    dtype: of products; weights and state are float32.
    remat: what the backward pass computes anew: none; blocks, all of each; or
      segments, all but what attention and memories read, what segments left,
      and weights before inner batches. That takes room, and no mixer runs as a
      whole again, nor is anything exchanged again along mesh.sequence.
    implementation: of swla, dla, titans and memora, as of their memories in
      `memcache_jax`; empty for the fastest.
  """

  family: str = "titans"
  caching: str = "grm"
  dim: int = 64
  num_layers: int = 2
  num_heads: int = 2
  hidden_dim: int = 0
  vocab_size: int = 264
  segment_length: int = 32
  window: int = 2048
  inner_batch: int = 16
  max_kept_bytes: int = 2**26
  top_k: int = 2
  write_mode: str = "independent"
  tie_embeddings: bool = True
  dtype: str = "float32"
  remat: str = "none"
  implementation: str = ""


@dataclass(frozen=True)
class DataSettings:
  """Where text comes from and how it becomes rows.

  Attributes:
    path: a file or a pattern of files; its ending says of which kind.
    evaluation_path: of the held-out text. Empty: every `held_out`-th document
      of `path`, which is then never trained on.
    held_out: see `evaluation_path`.
    text_key: field of the text in JSON lines and parquet.
    separator: what parts the documents of a text file; empty for one each.
    tokenizer: "bytes", or a file; see `examples.lm.tokenizers`.
    packing: "aligned": documents start at multiples of `align`, the layout
      that is fast. "first_fit": anywhere, filling gaps.
    align: tokens; a multiple of the segment length and the inner batch.
    max_documents: most documents of a row, with first_fit.
  """

  path: str = "examples/data/austen.txt.xz"
  evaluation_path: str = ""
  held_out: int = 20
  text_key: str = "text"
  separator: str = "\n\n\n\n"
  tokenizer: str = "bytes"
  packing: str = "aligned"
  align: int = 32
  max_documents: int = 8


@dataclass(frozen=True)
class OptimizerSettings:
  """AdamW, its schedule, and the loss.

  Attributes:
    peak: highest learning rate.
    warmup: steps until then.
    final_fraction: of the peak, at the last step.
    weight_decay: of weights; biases and scales do not decay.
    b1: decay of the first moment.
    b2: decay of the second moment.
    clip_norm: largest norm of the gradient.
    z_loss: factor of the squared log-normaliser in the loss.
    accumulate: parts in which a batch goes through the model.
  """

  peak: float = 4e-4
  warmup: int = 10
  final_fraction: float = 0.1
  weight_decay: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  clip_norm: float = 1.0
  z_loss: float = 0.0
  accumulate: int = 1


@dataclass(frozen=True)
class MeshSettings:
  """Devices along each axis; one may be -1, for all the rest.

  Attributes:
    data: rows, with all weights on each device.
    fsdp: rows, with the weights and moments spread.
    tensor: heads, hidden units and vocabulary.
    sequence: segments of a row, in models of cached memories alone that are
      written independently.
  """

  data: int = 1
  fsdp: int = -1
  tensor: int = 1
  sequence: int = 1


@dataclass(frozen=True)
class Settings:
  """A run.

  Attributes:
    model: what is trained.
    data: on what.
    optimizer: how.
    mesh: over which devices.
    seed: of the initial weights and of the order of documents.
    steps: updates.
    batch_size: rows per step, over all devices.
    length: tokens per row.
    log_every: steps between lines of the log.
    evaluate_every: steps between measurements; 0 for only the last.
    evaluation_batches: at most, of held-out rows.
    save_every: steps between checkpoints; the last step is always saved.
    keep: checkpoints kept.
    prefetch: batches made ahead of time.
    watch_tokens: first tokens of every held-out row on which memories are
      watched whenever the loss is measured, one by one; 0 for not at all.
    profile_steps: steps of each session to trace; 0 for none.
  """

  model: ModelSettings = field(default_factory=ModelSettings)
  data: DataSettings = field(default_factory=DataSettings)
  optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
  mesh: MeshSettings = field(default_factory=MeshSettings)
  seed: int = 0
  steps: int = 100
  batch_size: int = 8
  length: int = 256
  log_every: int = 10
  evaluate_every: int = 0
  evaluation_batches: int = 4
  save_every: int = 50
  keep: int = 2
  prefetch: int = 2
  watch_tokens: int = 0
  profile_steps: int = 0

  def __post_init__(self):
    _check(self)

  @classmethod
  def from_config(cls, config: ConfigDict) -> "Settings":
    """Makes them from what a config file returned and flags changed."""
    values = config.to_dict()
    for name, kind in _PARTS.items():
      values[name] = kind(**values[name])
    return cls(**values)

  def to_config(self) -> ConfigDict:
    """What a config file returns."""
    return ConfigDict(asdict(self))

  def identity(self) -> dict[str, Any]:
    """What makes it this run and no other, by dotted name."""
    values = {}
    for name, value in asdict(self).items():
      if name in _PARTS and name not in FREE:
        values |= {f"{name}.{key}": x for key, x in value.items()}
      elif name not in FREE:
        values[name] = value
    return values


_PARTS = {
  "model": ModelSettings,
  "data": DataSettings,
  "optimizer": OptimizerSettings,
  "mesh": MeshSettings,
}


def _check(settings: Settings) -> None:
  """Raises InputError for what can be seen to be wrong without a device."""
  positive = (
    "steps",
    "batch_size",
    "length",
    "log_every",
    "evaluation_batches",
    "save_every",
    "keep",
  )
  for name in positive:
    if getattr(settings, name) < 1:
      raise InputError(
        f"{name} must be at least 1: got {getattr(settings, name)}"
      )
  for name in ("watch_tokens", "profile_steps"):
    if getattr(settings, name) < 0:
      raise InputError(
        f"{name} must be at least 0: got {getattr(settings, name)}"
      )
  parts, data = settings.optimizer.accumulate, settings.data
  if parts < 1 or settings.batch_size % parts:
    raise InputError(
      "batch_size must be a multiple of optimizer.accumulate: got "
      f"{settings.batch_size} and {parts}"
    )
  if data.packing not in ("aligned", "first_fit"):
    raise InputError(
      f"data.packing must be aligned or first_fit: got {data.packing!r}"
    )
  if data.held_out < 2:
    raise InputError(f"data.held_out must be at least 2: got {data.held_out}")
  if settings.length % data.align:
    raise InputError(
      "length must be a multiple of data.align: got "
      f"{settings.length} and {data.align}"
    )
  for name, unit in dataclasses.asdict(settings.model).items():
    if name in ("segment_length", "inner_batch") and data.align % unit:
      raise InputError(
        f"data.align must be a multiple of model.{name}: got "
        f"{data.align} and {unit}"
      )
