"""What defines a run: equal settings and an equal text give equal numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
  """Sizes of the model and of its training.

  Attributes:
    text_sha256: of the text; two texts are two runs.
    seed: of the initial weights and of the order of the windows.
    steps: updates of the weights.
    batch_size: windows per step.
    window: bytes per window; also the longest context seen in training.
    dim: model width.
    num_layers: blocks, each a memory and a feed-forward layer.
    num_heads: heads of each memory.
    hidden_dim: width inside the feed-forward layers.
    segment_length: bytes after which the state of a memory is cached.
    learning_rate: its peak, after the warm-up.
    weight_decay: of the weights that `weight_decay_mask` names.
  """

  text_sha256: str
  seed: int = 0
  steps: int = 1000
  batch_size: int = 4
  window: int = 256
  dim: int = 128
  num_layers: int = 2
  num_heads: int = 4
  hidden_dim: int = 384
  segment_length: int = 32
  learning_rate: float = 3e-3
  weight_decay: float = 0.1
