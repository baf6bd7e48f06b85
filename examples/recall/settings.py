"""What defines a run; equal settings and an equal seed give equal numbers."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from examples.recall import tasks

MemoryName = Literal[
  "attention", "linear", "retnet", "swla", "dla", "titans", "gated_delta"
]
AggregateName = Literal[
  "none", "residual", "gated_residual", "soup", "sparse", "logarithmic"
]
GateName = Literal["context", "input", "shared", "none"]
SelectionName = Literal["hard", "straight_through"]
PoolingName = Literal["mean", "sum"]
WriteMode = Literal["independent", "checkpoint"]


@dataclass(frozen=True)
class Settings:
  """Sizes of the task, the model and the training.

  Attributes:
    task: what is asked, in stages of training. What is hardly ever found in
      long rows is found soon in short ones, and carried on to the longer ones
      of the next stage.
    memory: what every layer remembers with.
    aggregate: how cached memories are read; "none" caches nothing, and
      "logarithmic" is the gated residual over logarithmic segments.
    gate: where the gates of "gated_residual", "soup", "sparse" and
      "logarithmic" come from.
    selection: how the choice of "sparse" is trained: by what was chosen alone,
      or also by what was not.
    pooling: what gates compare with, where they compare: mean or sum of the
      keys of a segment.
    write_mode: whether each segment starts from the initial memory.
    segment_length: tokens per cached memory.
    dim: model width.
    num_layers: blocks.
    num_heads: heads per layer.
    conv_width: tokens that its short convolutions see.
    batch_tokens: tokens per step, the same for rows of every length.
    learning_rate: its peak, after the warm-up.
    weight_decay: of the weights that `weight_decay_mask` names.
    test_rows: rows to measure on, the same for every seed.
  """

  task: tasks.TaskSettings
  memory: MemoryName
  aggregate: AggregateName
  gate: GateName
  selection: SelectionName
  pooling: PoolingName
  write_mode: WriteMode
  segment_length: int
  dim: int
  num_layers: int
  num_heads: int
  conv_width: int
  batch_tokens: int
  learning_rate: float
  weight_decay: float
  test_rows: int

  def __post_init__(self):
    for name, choices in (
      ("memory", MemoryName),
      ("aggregate", AggregateName),
      ("gate", GateName),
      ("selection", SelectionName),
      ("pooling", PoolingName),
      ("write_mode", WriteMode),
    ):
      value = getattr(self, name)
      if value not in get_args(choices):
        raise ValueError(
          f"`{name}` must be one of {get_args(choices)}: got {value!r}."
        )

    if self.memory == "attention" and self.aggregate != "none":
      raise ValueError(
        "`aggregate` must be 'none' for attention, which has no memory to "
        f"cache: got {self.aggregate!r}."
      )
    for name in (
      *("segment_length", "dim", "num_layers", "num_heads", "conv_width"),
      *("batch_tokens", "test_rows"),
    ):
      value = getattr(self, name)
      if type(value) is not int or value < 1:
        raise ValueError(
          f"`{name}` must be an integer of at least 1: got {value!r}."
        )

    longest = max(stage.length for stage in self.task.stages)
    if longest > self.batch_tokens:
      raise ValueError(
        f"`batch_tokens` must hold a row of {longest} tokens: got "
        f"{self.batch_tokens}."
      )

  @property
  def steps(self) -> int:
    """Updates of the weights, all stages together."""
    return sum(stage.steps for stage in self.task.stages)

  def rows(self, length: int) -> int:
    """Rows of this length per step, or read at once."""
    return max(1, self.batch_tokens // length)


def parse(fields: dict[str, Any]) -> Settings:
  """The settings that the plain fields of a config, or a file, are."""
  return Settings(**fields | {"task": tasks.parse(fields["task"])})


def plain(settings: Settings) -> dict[str, Any]:
  """The fields that `parse` makes these settings from."""
  fields = dataclasses.asdict(settings)
  return fields | {"task": {"name": settings.task.name, **fields["task"]}}
