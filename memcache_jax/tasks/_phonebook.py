"""Looking a number up in a phone book."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memcache_jax.tasks._base import Sample, TextTask, largest
from memcache_jax.tasks._checks import check_integer, check_real
from memcache_jax.tasks._words import FIRST_NAMES, LAST_NAMES

# One to ask for, two to show how.
MIN_ENTRIES = 3
MAX_ENTRIES = len(FIRST_NAMES) * len(LAST_NAMES)


class Book(NamedTuple):
  """What is drawn for one sample, whatever its length."""

  lines: list[str]  # names and numbers all different
  places: np.ndarray  # of the question and two examples, in [0, 1)


@dataclass(frozen=True, kw_only=True)
class Phonebook(TextTask):
  """Phone-book lookup: of many lines that look alike, find one.

  A prompt is the book, in lines like `John Powell: 609-323-7777`, a blank line,
  two of its lines again as examples, and a name; its number is to follow. Every
  line is a distractor for every other. Names and numbers occur once in a book.
  Source: Jelassi et al., arXiv 2402.01032, section 4.3, also used in De et
  al., arXiv 2402.19427, section 6.2. Neither prints a whole prompt: how its
  parts are joined, and the lists of names, are ours.

  Attributes:
    num_entries: lines of the book; None for as many as fit into `length`.
    depth: where the line asked for stands, from 0 (first) to 1 (last); None
      draws it.

  Raises:
    ValueError: for a wrong argument, or a `length` without room for the book.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.tasks import Phonebook
    >>> task = Phonebook(length=256, num_entries=4, max_new_tokens=16)
    >>> sample = task.sample(np.random.default_rng(0))
    >>> for line in sample.prompt.split("\\n"):
    ...   print(line or "-")
    Charles Farrell: 729-496-5609
    Adam Kerr: 606-635-7757
    Edith Sutton: 912-755-5770
    Fanny Nelson: 813-270-2389
    -
    Edith Sutton: 912-755-5770
    Charles Farrell: 729-496-5609
    Fanny Nelson:
    >>> sample.continuation
    ' 813-270-2389'
  """

  num_entries: int | None = None
  depth: float | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.depth is not None:
      check_real("depth", self.depth, 0, 1)
    entries = MIN_ENTRIES
    if self.num_entries is not None:
      check_integer("num_entries", self.num_entries, MIN_ENTRIES)
      entries = self.num_entries
      if entries > MAX_ENTRIES:
        raise ValueError(
          f"`num_entries` must be at most {MAX_ENTRIES}, the number of names: "
          f"got {entries}."
        )
    name = f"{max(FIRST_NAMES, key=len)} {max(LAST_NAMES, key=len)}"
    longest = Book([_line(name, 0)] * entries, np.zeros(3))
    prompt, number, _ = self._prompt(longest, entries)
    self._check_room(prompt, f" {number}")

  def sample(self, rng: np.random.Generator) -> Sample:
    """Draws one question.

    Args:
      rng: source of randomness.

    Raises:
      ValueError: if this book does not fit, or, without `num_entries`, if all
        names together do not fill it.
    """
    book = self._draw(rng)
    entries = self.num_entries or self._fill(book)
    prompt, number, depth = self._prompt(book, entries)
    continuation = f" {number}"
    self._check_room(prompt, continuation)
    return Sample(
      prompt=prompt,
      answers=(number,),
      continuation=continuation,
      num_tokens=self._count(prompt),
      depth=depth,
    )

  def _draw(self, rng: np.random.Generator) -> Book:
    # No line is shorter than a token, so more are never needed.
    count = self.num_entries or min(self.length, MAX_ENTRIES)
    names = rng.choice(MAX_ENTRIES, count, replace=False).tolist()
    numbers = rng.choice(10**10, count, replace=False).tolist()
    first = len(FIRST_NAMES)
    return Book(
      [
        _line(
          f"{FIRST_NAMES[name % first]} {LAST_NAMES[name // first]}", number
        )
        for name, number in zip(names, numbers, strict=True)
      ],
      rng.random(3),
    )

  def _fill(self, book: Book) -> int:
    entries = largest(
      lambda n: self._count(self._prompt(book, MIN_ENTRIES + n)[0]),
      self._room,
      at_most=len(book.lines) - MIN_ENTRIES,
    )
    entries += MIN_ENTRIES
    if entries == MAX_ENTRIES:
      raise ValueError(
        "`length` must not be above what all names together fill, or "
        f"`num_entries` be given: got {self.length}."
      )
    return entries

  def _prompt(self, book: Book, entries: int) -> tuple[str, str, float]:
    """The prompt of so many lines, its answer, and the depth of that."""
    lines = book.lines[:entries]
    place = book.places[0] if self.depth is None else self.depth
    asked = min(int(place * entries), entries - 1)
    others = [*lines[:asked], *lines[asked + 1 :]]
    first = others.pop(int(book.places[1] * len(others)))
    second = others[int(book.places[2] * len(others))]
    name, number = lines[asked].split(": ")
    text = "\n".join(lines)
    before = sum(len(line) + 1 for line in lines[:asked])
    depth = before / (len(text) - len(lines[asked]))
    return f"{text}\n\n{first}\n{second}\n{name}:", number, depth


def _line(name: str, number: int) -> str:
  digits = f"{number:010}"
  return f"{name}: {digits[:3]}-{digits[3:6]}-{digits[6:]}"
