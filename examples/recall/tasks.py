"""What a model is trained and measured on, with its lengths and steps."""

import dataclasses
import functools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from memcache_jax.tasks import (
  MQAR,
  Batch,
  NeedleInHaystack,
  Sample,
  Task,
  TextTask,
  Tokenizer,
  WordTokenizer,
  exact_match,
  token_accuracy,
)

# A colon, a space and seven digits.
_ANSWER_TOKENS = 9
# The most that a row without a haystack has.
_ALONE = 45


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
    haystack: whether the needle lies in noise, as it does where it is measured.
      If not, next to nothing is in the way, see `NeedleAlone`.
    steps: updates of the weights.
  """

  length: int
  haystack: bool
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
    stages = _stages(self.stages, PairsStage)
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

  def score(self, predictions: np.ndarray, batch: Batch) -> float:
    """The share of answers that are right."""
    return token_accuracy(predictions, batch)


@dataclass(frozen=True)
class Needle:
  """S-NIAH-1 in words; see `memcache_jax.tasks.NeedleInHaystack`.

  Attributes:
    stages: lengths, haystacks or none, and steps, in this order.
    test_lengths: where it is measured; what no stage has is new to the model.
  """

  stages: tuple[NeedleStage, ...]
  test_lengths: tuple[int, ...]

  name: ClassVar[str] = "needle"
  facts: ClassVar[int] = 1

  def __post_init__(self):
    stages = _stages(self.stages, NeedleStage)
    object.__setattr__(self, "stages", stages)
    lengths = self.test_lengths
    if not isinstance(lengths, tuple | list) or not lengths:
      raise ValueError(
        f"`test_lengths` must be a tuple of at least one: got {lengths!r}."
      )
    object.__setattr__(self, "test_lengths", tuple(lengths))
    for stage in stages:
      self.source(stage)  # raises for one without room
    for length in lengths:
      _needle(length)  # as above

  @property
  def vocab_size(self) -> int:
    """Ids of the task and the model."""
    return words().vocab_size

  def source(self, stage: NeedleStage) -> TextTask:
    """The source of the rows of a stage."""
    if stage.haystack:
      return _needle(stage.length)
    return NeedleAlone(length=stage.length)

  @property
  def tests(self) -> dict[int, Task]:
    """What is measured, by length."""
    return {length: _needle(length) for length in self.test_lengths}

  def score(self, predictions: np.ndarray, batch: Batch) -> float:
    """The share of rows whose number is right in all digits."""
    return exact_match(predictions, batch)


@functools.cache
def words() -> WordTokenizer:
  """Knows the words of needle prompts; digits and signs are bytes."""
  return WordTokenizer.of_text(NeedleInHaystack(length=600).words)


@dataclass(frozen=True, kw_only=True)
class NeedleAlone(TextTask):
  """The needle and the last sentence of a question, without a haystack.

  Both go back only some words from the number, as many as are drawn: at least
  ` is: NUMBER.` and ` is: NUMBER`, of which a third is to be recalled.
  """

  tokenizer: Tokenizer = field(default_factory=words)
  max_new_tokens: int = _ANSWER_TOKENS

  def __post_init__(self):
    super().__post_init__()
    if self.length < _ALONE:
      raise ValueError(
        f"`length` must be at least {_ALONE} without a haystack: got "
        f"{self.length}."
      )

  def sample(self, rng: np.random.Generator) -> Sample:
    """Draws one question."""
    whole = _needle(128).sample(rng)
    lines = whole.prompt.splitlines()
    needle = next(line for line in lines if whole.answers[0] in line)
    _, asked = lines[-1].split("? ")
    count = int(rng.integers(1, len(asked.split(" ")) + 1))
    prompt = f"{_last(needle, count + 1)}\n{_last(asked, count)}"
    num_tokens = len(self.tokenizer.encode(prompt))
    return replace(whole, prompt=prompt, num_tokens=num_tokens, depth=0.0)


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


def _last(text: str, count: int) -> str:
  """The last words of a text with the space before them, or all of it."""
  words = text.split(" ")
  return text if count >= len(words) else " ".join(["", *words[-count:]])


@functools.cache
def _needle(length: int) -> NeedleInHaystack:
  return NeedleInHaystack(
    length=length, tokenizer=words(), max_new_tokens=_ANSWER_TOKENS
  )


def _stages(stages: Any, kind: type[PairsStage] | type[NeedleStage]) -> tuple:
  """Stages as such, given them or plain tuples."""
  if not isinstance(stages, tuple | list) or not stages:
    raise ValueError(
      f"`stages` must be a tuple of at least one: got {stages!r}."
    )
  fields, found = kind.__annotations__, []
  for stage in stages:
    is_row = isinstance(stage, tuple | list)
    if not is_row or [type(size) for size in stage] != list(fields.values()):
      wanted = ", ".join(f"{name} ({x.__name__})" for name, x in fields.items())
      raise ValueError(f"`stages` must hold {wanted} each: got {stage!r}.")
    stage = kind(*stage)
    if stage.steps < 1:
      raise ValueError(f"`steps` must be at least 1: got {stage.steps}.")
    found.append(stage)
  return tuple(found)
