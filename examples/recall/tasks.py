"""What a model is trained and measured on, with its lengths and steps."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from memcache_jax.tasks import (
  MQAR,
  Batch,
  NeedleInHaystack,
  Task,
  WordTokenizer,
  exact_match,
  token_accuracy,
)

# A colon, a space, three pairs of digits and the last one.
_ANSWER_TOKENS = 6


class PairsStage(NamedTuple):
  """A part of the training on `Pairs`.

  Attributes:
    length: tokens per row.
    num_pairs: keys and values to remember.
    steps: updates of the weights.
  """

  length: int
  num_pairs: int
  steps: int


class NeedleStage(NamedTuple):
  """A part of the training on `Needle`.

  Attributes:
    length: tokens per row.
    steps: updates of the weights.
  """

  length: int
  steps: int


@dataclass(frozen=True)
class Pairs:
  """Multi-query associative recall; see `memcache_jax.tasks.MQAR`.

  Attributes:
    stages: lengths, numbers of pairs and steps, in this order. The last one is
      what is measured.
    vocab_size: ids of the task and the model.
    random_fillers: whether blanks are filled with random ids.
  """

  stages: tuple[PairsStage, ...]
  vocab_size: int
  random_fillers: bool

  name: ClassVar[str] = "mqar"

  def __post_init__(self):
    stages = _stages(self.stages, PairsStage, "a length, a number of pairs and")
    object.__setattr__(self, "stages", stages)
    for stage in stages:
      self.source(stage)  # raises for sizes that do not go together

  def source(self, stage: PairsStage) -> MQAR:
    """The source of the rows of a stage."""
    return MQAR(
      length=stage.length,
      num_pairs=stage.num_pairs,
      vocab_size=self.vocab_size,
      random_fillers=self.random_fillers,
    )

  @property
  def facts(self) -> int:
    """What there is to remember at once."""
    return self.stages[-1].num_pairs

  @property
  def tests(self) -> dict[int, Task]:
    """What is measured, by length."""
    return {self.stages[-1].length: self.source(self.stages[-1])}

  def learned(self, batch: Batch) -> np.ndarray:
    """Where targets are trained on, [b t]: the answers."""
    return batch.answer_mask

  def score(self, predictions: np.ndarray, batch: Batch) -> float:
    """The share of answers that are right."""
    return token_accuracy(predictions, batch)


@dataclass(frozen=True)
class Needle:
  """S-NIAH-1 in words; see `memcache_jax.tasks.NeedleInHaystack`.

  Attributes:
    stages: lengths and steps, in this order.
    test_lengths: where it is measured; what no stage has is new to the model.
  """

  stages: tuple[NeedleStage, ...]
  test_lengths: tuple[int, ...]

  name: ClassVar[str] = "needle"
  facts: ClassVar[int] = 1

  def __post_init__(self):
    stages = _stages(self.stages, NeedleStage, "a length and")
    object.__setattr__(self, "stages", stages)
    lengths = self.test_lengths
    if not isinstance(lengths, tuple | list) or not lengths:
      raise ValueError(
        f"`test_lengths` must be a tuple of at least one: got {lengths!r}."
      )
    object.__setattr__(self, "test_lengths", tuple(lengths))
    for length in (*(stage.length for stage in stages), *lengths):
      _needle(length)  # raises for one without room

  @property
  def vocab_size(self) -> int:
    """Ids of the task and the model."""
    return words().vocab_size

  def source(self, stage: NeedleStage) -> NeedleInHaystack:
    """The source of the rows of a stage."""
    return _needle(stage.length)

  @property
  def tests(self) -> dict[int, Task]:
    """What is measured, by length."""
    return {length: _needle(length) for length in self.test_lengths}

  def learned(self, batch: Batch) -> np.ndarray:
    """Where targets are trained on, [b t]: the whole text.

    Its key, too, comes back; from the answers alone it takes far longer to
    find out that something does.
    """
    return batch.mask

  def score(self, predictions: np.ndarray, batch: Batch) -> float:
    """The share of rows whose number is right in all digits."""
    return exact_match(predictions, batch)


TaskSettings: TypeAlias = Pairs | Needle


def parse(fields: dict[str, Any]) -> TaskSettings:
  """The task that the fields of a config name.

  Raises:
    ValueError: for another name, or fields that are not those of the task.
  """
  match fields:
    case {"name": Pairs.name, **rest}:
      kind = Pairs
    case {"name": Needle.name, **rest}:
      kind = Needle
    case _:
      raise ValueError(
        f"`task` must have a name, {Pairs.name!r} or {Needle.name!r}: got "
        f"{fields!r}."
      )
  wanted = [field.name for field in dataclasses.fields(kind)]
  if set(rest) != set(wanted):
    raise ValueError(
      f"`task` must have {wanted} beside its name {kind.name!r}: got "
      f"{list(rest)}."
    )
  return kind(**rest)


@functools.cache
def words() -> WordTokenizer:
  """Knows the words and pairs of digits of needle prompts; signs are bytes."""
  return WordTokenizer.of_text(NeedleInHaystack(length=600).words)


@functools.cache
def _needle(length: int) -> NeedleInHaystack:
  return NeedleInHaystack(
    length=length, tokenizer=words(), max_new_tokens=_ANSWER_TOKENS
  )


def _stages(stages: Any, kind: Callable[..., Any], sizes: str) -> tuple:
  """Stages as such, given them or plain tuples."""
  if not isinstance(stages, tuple | list) or not stages:
    raise ValueError(
      f"`stages` must be a tuple of at least one: got {stages!r}."
    )
  found = []
  for stage in stages:
    is_row = isinstance(stage, tuple | list) and len(stage) == len(kind._fields)
    if not is_row or any(type(size) is not int for size in stage):
      raise ValueError(
        f"`stages` must hold {sizes} steps each, all integers: got {stage!r}."
      )
    stage = kind(*stage)
    if stage.steps < 1:
      raise ValueError(f"`steps` must be at least 1: got {stage.steps}.")
    found.append(stage)
  return tuple(found)
