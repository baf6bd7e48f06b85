"""What defines a run; equal settings and an equal seed give equal numbers."""

from dataclasses import dataclass
from typing import Literal, get_args

from memcache_jax.tasks import MQAR

MemoryName = Literal[
  "attention", "linear", "swla", "dla", "titans", "gated_delta"
]
AggregateName = Literal[
  "none", "residual", "gated_residual", "soup", "sparse", "logarithmic"
]
GateName = Literal["context", "input", "shared", "none"]
WriteMode = Literal["independent", "checkpoint"]


@dataclass(frozen=True)
class Settings:
  """Sizes of the task, the model and the training.

  Attributes:
    length: tokens per row.
    num_pairs: keys and values to remember, in the rows to measure on.
    train_pairs: those of the rows to train on; batches take turns. Few pairs
      are learned soon, and many of them after that.
    vocab_size: ids of the task and the model.
    random_fillers: whether blanks are filled with random ids.
    memory: what every layer remembers with.
    aggregate: how cached memories are read; "none" caches nothing, and
      "logarithmic" is the gated residual over logarithmic segments.
    gate: where the gates of "gated_residual", "soup", "sparse" and
      "logarithmic" come from.
    write_mode: whether each segment starts from the initial memory.
    segment_length: tokens per cached memory.
    dim: model width.
    num_layers: blocks.
    num_heads: heads per layer.
    steps: updates of the weights.
    batch_size: rows per step.
    learning_rate: its peak, after the warm-up.
    weight_decay: of the weights that `weight_decay_mask` names.
    test_rows: rows to measure on, the same for every seed.
  """

  length: int
  num_pairs: int
  train_pairs: tuple[int, ...]
  vocab_size: int
  random_fillers: bool
  memory: MemoryName
  aggregate: AggregateName
  gate: GateName
  write_mode: WriteMode
  segment_length: int
  dim: int
  num_layers: int
  num_heads: int
  steps: int
  batch_size: int
  learning_rate: float
  weight_decay: float
  test_rows: int

  def __post_init__(self):
    for name, choices in (
      ("memory", MemoryName),
      ("aggregate", AggregateName),
      ("gate", GateName),
      ("write_mode", WriteMode),
    ):
      value = getattr(self, name)
      if value not in get_args(choices):
        raise ValueError(
          f"`{name}` must be one of {get_args(choices)}: got {value!r}."
        )

    if not self.train_pairs:
      raise ValueError("`train_pairs` must not be empty.")

  def task(self, num_pairs: int) -> MQAR:
    """The source of rows with this many pairs."""
    return MQAR(
      length=self.length,
      num_pairs=num_pairs,
      vocab_size=self.vocab_size,
      random_fillers=self.random_fillers,
    )
