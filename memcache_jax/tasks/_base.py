"""What all tasks have in common: samples, batches, and budgets of tokens."""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from memcache_jax.tasks._checks import check_generator, check_integer
from memcache_jax.tasks._tokenizer import ByteTokenizer, Tokenizer


class Batch(NamedTuple):
  """Rows for a model, NumPy arrays [b t]; also a pytree for JAX.

  Attributes:
    tokens: int32 ids that the model reads.
    targets: int32 ids it should predict, each at the place where it is
      predicted: `logits[b, t]` belongs to `targets[b, t]`. Text tasks state
      the next token everywhere; the others only the answers, else 0.
    answer_mask: bool, True where the target is part of an answer: the places
      to score, and the loss mask if only answers are to be learned.
    mask: bool, True for tokens that exist, False for padding on the right.
  """

  tokens: np.ndarray
  targets: np.ndarray
  answer_mask: np.ndarray
  mask: np.ndarray


@runtime_checkable
class Task(Protocol):
  """A source of questions whose answers stand in the text.

  A task is a frozen dataclass of options and holds no randomness: equal
  generators give equal batches. `np.random.default_rng([seed, step])` is an
  endless stream that can go on anywhere.
  """

  def batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
    """Draws rows for training or scoring."""
    ...


@dataclass(frozen=True)
class Sample:
  """A question in text.

  Attributes:
    prompt: what the model reads.
    answers: the strings that its output must contain.
    continuation: what a perfect model writes; contains the answers.
    num_tokens: length of the prompt in tokens.
    depth: share of the characters of the context that stand before the fact
      asked for: 0 at its beginning, 1 at its end.
    cut_tokens: tokens of the source document that had to be left out.
  """

  prompt: str
  answers: tuple[str, ...]
  continuation: str
  num_tokens: int
  depth: float
  cut_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class TextTask(abc.ABC):
  """Base of the tasks in text, whose length is a budget of tokens.

  The prompt, counted by the tokenizer, and `max_new_tokens` for the answer
  fit into `length`. The context is filled up to that; nothing is cut to make
  it fit, and a budget without room for the question is an error.

  Attributes:
    length: tokens for the prompt and its answer.
    tokenizer: counts, and makes the ids of batches.
    max_new_tokens: tokens reserved for the answer.
  """

  length: int
  tokenizer: Tokenizer = ByteTokenizer()
  max_new_tokens: int = 128

  def __post_init__(self):
    check_integer("length", self.length, 1)
    check_integer("max_new_tokens", self.max_new_tokens, 1)
    if not isinstance(self.tokenizer, Tokenizer):
      raise ValueError(
        "`tokenizer` must have encode, decode and vocab_size: got a "
        f"{type(self.tokenizer).__name__}."
      )

  @abc.abstractmethod
  def sample(self, rng: np.random.Generator) -> Sample:
    """Draws one question."""

  def batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
    """Draws questions and collates them.

    Args:
      rng: source of randomness.
      batch_size: number of rows.
    """
    check_generator(rng)
    check_integer("batch_size", batch_size, 1)
    return self.collate([self.sample(rng) for _ in range(batch_size)])

  def collate(self, samples: Sequence[Sample]) -> Batch:
    """Makes rows of prompt and continuation, padded on the right.

    Args:
      samples: questions of this task.

    Returns:
      Rows of `length` tokens. The answer mask covers the continuation.

    Raises:
      ValueError: if a row is longer than `length`, or an id lies outside the
        vocabulary.
    """
    shape = (len(samples), self.length)
    batch = Batch(
      np.zeros(shape, np.int32),
      np.zeros(shape, np.int32),
      np.zeros(shape, bool),
      np.zeros(shape, bool),
    )
    for row, sample in enumerate(samples):
      prompt = list(self.tokenizer.encode(sample.prompt))
      answer = list(self.tokenizer.encode(sample.continuation))
      self._check_row(prompt, answer)
      # The last token is only ever predicted, never read.
      end = len(prompt) + len(answer) - 1
      batch.tokens[row, :end] = [*prompt, *answer][:-1]
      batch.targets[row, :end] = [*prompt, *answer][1:]
      batch.answer_mask[row, len(prompt) - 1 : end] = True
      batch.mask[row, :end] = True
    return batch

  def _check_row(self, prompt: list[int], answer: list[int]) -> None:
    if len(prompt) + len(answer) > self.length:
      raise ValueError(
        f"`length` must be at least {len(prompt) + len(answer)} for this "
        f"sample: got {self.length}."
      )
    low, high = min(prompt + answer), max(prompt + answer)
    if low < 0 or high >= self.tokenizer.vocab_size:
      raise ValueError(
        f"`tokenizer` must give ids from 0 to {self.tokenizer.vocab_size - 1}:"
        f" got ids from {low} to {high}."
      )

  def _count(self, text: str) -> int:
    return len(self.tokenizer.encode(text))

  @property
  def _room(self) -> int:
    """Tokens for the prompt."""
    return self.length - self.max_new_tokens

  def _check_room(self, smallest_prompt: str, continuation: str) -> None:
    """Raises ValueError when there is no room even for these."""
    answer = self._count(continuation)
    if answer > self.max_new_tokens:
      raise ValueError(
        f"`max_new_tokens` must be at least {answer}, the length of the "
        f"answer: got {self.max_new_tokens}."
      )
    needed = self._count(smallest_prompt) + self.max_new_tokens
    if needed > self.length:
      raise ValueError(
        f"`length` must be at least {needed}, {self.max_new_tokens} of it "
        f"for the answer (`max_new_tokens`): got {self.length}."
      )


def largest(
  count: Callable[[int], int], room: int, at_most: float = math.inf
) -> int:
  """The largest size whose tokens fit into the room.

  Counting is what costs, and tokens grow almost evenly with the size, so a few
  straight lines find the place. Where the count is not quite monotone, as with
  tokenizers that merge, the result still fits and the next size does not.

  Args:
    count: tokens of a size; size 0 need not fit.
    room: tokens there are.
    at_most: the largest size there is.

  Returns:
    The size; 0 if not even 1 fits.
  """
  low, low_count = 0, count(0)
  high, high_count = 1, low_count
  # Outwards until it no longer fits ...
  while high <= at_most and (high_count := count(high)) <= room:
    per_piece = max(1.0, (high_count - low_count) / (high - low))
    low, low_count = high, high_count
    high = low + 1 + int((room - low_count) / per_piece)
    if high > at_most:
      high = max(int(at_most), low + 1)
  # ... and inwards, by halves where lines do not help.
  for turn in range(64):
    if high > at_most or high - low <= 1:
      break
    share = (room - low_count) / max(1, high_count - low_count)
    share = 0.5 if turn % 3 == 2 else share
    guess = low + round((high - low) * share)
    guess = min(max(guess, low + 1), high - 1)
    tokens = count(guess)
    if tokens <= room:
      low, low_count = guess, tokens
    else:
      high, high_count = guess, tokens
  return low
