"""What defines a run; equal settings and an equal seed give equal numbers."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from memcache_jax.tasks import MQAR

MemoryName = Literal[
  "attention", "linear", "swla", "dla", "titans", "gated_delta"
]
AggregateName = Literal[
  "none", "residual", "gated_residual", "soup", "sparse", "logarithmic"
]
GateName = Literal["context", "input", "shared", "none"]
WriteMode = Literal["independent", "checkpoint"]


class Stage(NamedTuple):
  """A part of the training.

  Attributes:
    length: tokens per row.
    num_pairs: keys and values to remember.
    steps: updates of the weights.
  """

  length: int
  num_pairs: int
  steps: int


@dataclass(frozen=True)
class Settings:
  """Sizes of the task, the model and the training.

  Attributes:
    stages: lengths, numbers of pairs and steps, in this order, as `Stage` or
      plain tuples. What is hardly ever found in long rows is found soon in
      short ones, and carried on to the longer ones of the next stage. The
      last stage is the task that is measured.
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
    batch_tokens: tokens per step, the same for rows of every length.
    learning_rate: its peak, after the warm-up.
    weight_decay: of the weights that `weight_decay_mask` names.
    test_rows: rows to measure on, the same for every seed.
  """

  stages: tuple[Stage, ...]
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
  batch_tokens: int
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

    if self.memory == "attention" and self.aggregate != "none":
      raise ValueError(
        "`aggregate` must be 'none' for attention, which has no memory to "
        f"cache: got {self.aggregate!r}."
      )
    for name in (
      *("segment_length", "dim", "num_layers", "num_heads"),
      *("batch_tokens", "test_rows"),
    ):
      value = getattr(self, name)
      if type(value) is not int or value < 1:
        raise ValueError(
          f"`{name}` must be an integer of at least 1: got {value!r}."
        )

    if not isinstance(self.stages, tuple | list) or not self.stages:
      raise ValueError(
        f"`stages` must be a tuple of at least one: got {self.stages!r}."
      )
    stages = []
    for stage in self.stages:
      sizes = isinstance(stage, tuple | list) and len(stage) == 3
      if not sizes or any(type(size) is not int for size in stage):
        raise ValueError(
          "`stages` must hold a length, a number of pairs and steps each, all "
          f"integers: got {stage!r}."
        )
      stage = Stage(*stage)
      self.task(stage)  # raises for sizes that do not go together
      if stage.steps < 1:
        raise ValueError(f"`steps` must be at least 1: got {stage.steps}.")
      if stage.length > self.batch_tokens:
        raise ValueError(
          f"`batch_tokens` must hold a row of {stage.length} tokens: got "
          f"{self.batch_tokens}."
        )
      stages.append(stage)
    object.__setattr__(self, "stages", tuple(stages))

  @property
  def steps(self) -> int:
    """Updates of the weights, all stages together."""
    return sum(stage.steps for stage in self.stages)

  def task(self, stage: Stage) -> MQAR:
    """The source of the rows of a stage."""
    return MQAR(
      length=stage.length,
      num_pairs=stage.num_pairs,
      vocab_size=self.vocab_size,
      random_fillers=self.random_fillers,
    )

  def rows(self, stage: Stage) -> int:
    """Rows per step of a stage."""
    return self.batch_tokens // stage.length
