"""Reading a value off a page."""

import collections
import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memcache_jax.tasks._base import Sample, TextTask, largest

SHORTEST_VALUE, LONGEST_VALUE = 3, 40


class Fact(NamedTuple):
  """A line of a document whose value can be asked for."""

  document: int  # which one
  start: int  # of the line in its document, in characters
  attribute: str
  value: str

  @property
  def line(self) -> str:
    """The line as it stands in the document."""
    return f"{self.attribute}: {self.value}"


@dataclass(frozen=True, kw_only=True)
class Extraction(TextTask):
  """Information extraction from real pages, in the form of SWDE and FDA.

  Documents consist of lines, many of them `Attribute: value`. The prompt is a
  document, cut around the line asked for if it is too long, then `. ` and
  `Attribute:`. Asked for are values of 3 to 40 characters that occur nowhere
  else in their document, in any case of letters, under attributes that occur
  once. Score outputs with `string_match_any`. Protocol: Arora et al., arXiv
  2407.05483, and its code (github.com/HazyResearch/prefix-linear-attention):
  at most half of the budget for what stands before the answer, the rest for
  what follows. There the attribute counts as part of the reserve of 50 tokens;
  here it is counted by itself.

  Attributes:
    documents: the pages, each a text of lines.

  Raises:
    ValueError: for a wrong argument, documents without such a line, or a
      `length` without room for the longest of these lines.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.tasks import Extraction
    >>> lines = ["Name: Atlantis", "Capital: Poseidonis", "Coastline: 1,200 km"]
    >>> page = "\\n".join(lines)
    >>> task = Extraction(length=128, documents=(page,))
    >>> sample = task.sample(np.random.default_rng(0))
    >>> print(sample.prompt)
    Name: Atlantis
    Capital: Poseidonis
    Coastline: 1,200 km. Coastline:
    >>> sample.answers, sample.cut_tokens
    (('1,200 km',), 0)
  """

  documents: tuple[str, ...] = field(repr=False)
  max_new_tokens: int = 50

  def __post_init__(self):
    super().__post_init__()
    if not isinstance(self.documents, tuple) or not all(
      isinstance(document, str) for document in self.documents
    ):
      raise ValueError(
        "`documents` must be a tuple of texts: got a "
        f"{type(self.documents).__name__}."
      )
    if not self.facts:
      raise ValueError(
        "`documents` must have a line `Attribute: value` whose value, of "
        f"{SHORTEST_VALUE} to {LONGEST_VALUE} characters, occurs once: got "
        f"none in {len(self.documents)} documents."
      )
    longest = max(self.facts, key=lambda fact: len(fact.line + fact.attribute))
    # Twice what stands before the answer, which gets half of the room.
    window = 2 * f"{longest.attribute}: " + longest.value
    value = max((fact.value for fact in self.facts), key=len)
    self._check_room(_prompt(window, longest), f" {value}")

  @functools.cached_property
  def facts(self) -> tuple[Fact, ...]:
    """All lines that can be asked for, in order."""
    return tuple(
      fact
      for number, document in enumerate(self.documents)
      for fact in _facts(number, document)
    )

  def sample(self, rng: np.random.Generator) -> Sample:
    """Draws one question, every line being equally likely.

    Args:
      rng: source of randomness.

    Raises:
      ValueError: if the line asked for does not fit.
    """
    return self.ask(self.facts[rng.integers(len(self.facts))])

  def ask(self, fact: Fact) -> Sample:
    """Makes the question for one of `facts`.

    Args:
      fact: the line to ask for.

    Raises:
      ValueError: if the line does not fit.
    """
    document = self.documents[fact.document]
    answer = fact.start + len(fact.line) - len(fact.value)
    start, end = 0, len(document)
    if self._count(_prompt(document, fact)) > self._room:
      room = self._room - self._count(_prompt("", fact))
      start = answer - largest(
        lambda n: self._count(document[answer - n : answer]),
        room // 2,
        at_most=answer,
      )
      end = answer + largest(
        lambda n: self._count(_prompt(document[start : answer + n], fact)),
        self._room,
        at_most=len(document) - answer,
      )
    if fact.start < start or end < answer + len(fact.value):
      raise ValueError(
        f"`length` must have room for {fact.line!r} and the question: got "
        f"{self.length}."
      )
    window = document[start:end]
    prompt = _prompt(window, fact)
    rest = len(window) - len(fact.line)
    return Sample(
      prompt=prompt,
      answers=(fact.value,),
      continuation=f" {fact.value}",
      num_tokens=self._count(prompt),
      depth=(fact.start - start) / rest if rest else 0.0,
      cut_tokens=self._count(document) - self._count(window),
    )


def _prompt(window: str, fact: Fact) -> str:
  return f"{window.rstrip('.')}. {fact.attribute}:"


def _facts(number: int, document: str) -> list[Fact]:
  """The lines of one document whose value can be asked for."""
  lower = document.lower()
  lines = document.split("\n")
  attributes = collections.Counter(line.split(": ")[0] for line in lines)
  found, start = [], 0
  for line in lines:
    attribute, separator, value = line.partition(": ")
    if (
      separator
      and attribute
      and value == value.strip()
      and SHORTEST_VALUE <= len(value) <= LONGEST_VALUE
      and attributes[attribute] == 1
      and lower.count(value.lower()) == 1
    ):
      found.append(Fact(number, start, attribute, value))
    start += len(line) + 1
  return found
