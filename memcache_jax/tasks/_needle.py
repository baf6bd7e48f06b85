"""Single needles in a haystack."""

import functools
import uuid
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from memcache_jax.tasks._base import Sample, TextTask, largest
from memcache_jax.tasks._checks import check_real, check_text
from memcache_jax.tasks._words import ADJECTIVES, NOUNS

NOISE = (
  "The grass is green. The sky is blue. The sun is yellow. Here we go. "
  "There and back again."
)
# RULER draws one of so many depths, evenly spaced and rounded to percents.
DEPTHS = np.round(np.linspace(0, 100, num=40)).astype(int)
TITLES = frozenset(("Mr.", "Mrs.", "Dr.", "St.", "Messrs.", "Capt.", "Col."))


class Needle(NamedTuple):
  """What is drawn for one sample, whatever the length of the haystack."""

  key: str
  value: str
  percent: float  # depth in an essay
  place: float  # depth among lines of noise, in [0, 1]

  def sentence(self, kind: str) -> str:
    return f"One of the special magic {kind}s for {self.key} is: {self.value}."


@dataclass(frozen=True, kw_only=True)
class NeedleInHaystack(TextTask):
  """One fact hidden in a long text, as in RULER's single needle tasks.

  `One of the special magic numbers for KEY is: VALUE.` stands somewhere in a
  haystack, and the prompt ends `... The special magic number for KEY mentioned
  in the provided text is`. Source: Hsieh et al., arXiv 2404.06654, and its code
  (github.com/NVIDIA/RULER). Its three tasks are

  ========  =========================  ==========================
  task      haystack, value            arguments beside `length`
  ========  =========================  ==========================
  S-NIAH-1  one line repeated, number  none
  S-NIAH-2  essays, number             `essays`
  S-NIAH-3  essays, uuid               `essays`, `value="uuid"`
  ========  =========================  ==========================

  In noise the needle is a line of its own, before any line with the same
  probability; in essays it stands between sentences, at one of 40 depths.
  Numbers have seven digits; uuids are of version 4. The haystack has as many
  lines, or words of the essays (repeated if they end), as fit. Numbers made
  with it differ from RULER's in three ways: the essays are yours, since those
  of RULER are under copyright; keys come from word lists of our own; and
  sentences end at full stops, found without a trained splitter.

  Attributes:
    essays: the text of the haystack; None for the repeated line.
    value: what is hidden, "number" or "uuid".
    depth: where the needle stands, from 0 (start) to 1 (end); None draws it.

  Raises:
    ValueError: for a wrong argument, or a `length` without room for a line or
      a word beside the question.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.tasks import NeedleInHaystack
    >>> task = NeedleInHaystack(length=512, max_new_tokens=16)
    >>> sample = task.sample(np.random.default_rng(0))
    >>> print(sample.prompt)
    A special magic number is hidden within the following text. Make sure to
    memorize it. I will quiz you about the number afterwards.
    One of the special magic numbers for sunny-orchid is: 5600228.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There
    and back again.
    What is the special magic number for sunny-orchid mentioned in the provided
    text? The special magic number for sunny-orchid mentioned in the provided
    text is
    >>> sample.answers, sample.num_tokens, sample.depth
    (('5600228',), 441, 0.0)
  """

  essays: str | None = field(default=None, repr=False)
  value: Literal["number", "uuid"] = "number"
  depth: float | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.essays is not None:
      check_text("essays", self.essays)
    if self.value not in ("number", "uuid"):
      raise ValueError(
        f"`value` must be 'number' or 'uuid': got {self.value!r}."
      )
    if self.depth is not None:
      check_real("depth", self.depth, 0, 1)
    longest = Needle(
      key=f"{max(ADJECTIVES, key=len)}-{max(NOUNS, key=len)}",
      value="9" * 7 if self.value == "number" else str(uuid.UUID(int=0)),
      percent=0.0,
      place=0.0,
    )
    prompt, _ = self._prompt(longest, 1)
    self._check_room(prompt, f": {longest.value}")

  def sample(self, rng: np.random.Generator) -> Sample:
    """Draws one question.

    Its key and value occur nowhere else in the haystack, and its prompt would
    not fit with one line, or word, more.

    Args:
      rng: source of randomness.

    Raises:
      ValueError: if this prompt does not fit with a haystack of one piece.
    """
    needle = self._draw(rng)
    pieces = largest(
      lambda n: self._count(self._prompt(needle, n)[0]), self._room
    )
    prompt, depth = self._prompt(needle, max(pieces, 1))
    continuation = f": {needle.value}"
    self._check_room(prompt, continuation)
    return Sample(
      prompt=prompt,
      answers=(needle.value,),
      continuation=continuation,
      num_tokens=self._count(prompt),
      depth=depth,
    )

  @property
  def words(self) -> str:
    """A text of all words that prompts hold.

    For tokenizers made of a text, such as `WordTokenizer`.
    """
    needle = Needle("", "", percent=0.0, place=0.0)
    prompt, _ = self._prompt(needle, 1)
    # Both stand after spaces and at the beginning of lines.
    twice = f"{needle.sentence(self.value)} {self.essays or ''} " * 2
    keys = [f" {word}-" for word in ADJECTIVES] + [f"-{word}" for word in NOUNS]
    return "\n".join((prompt, twice, self.essays or "", *keys))

  def _draw(self, rng: np.random.Generator) -> Needle:
    while True:
      adjective = ADJECTIVES[rng.integers(len(ADJECTIVES))]
      noun = NOUNS[rng.integers(len(NOUNS))]
      needle = Needle(
        key=f"{adjective}-{noun}",
        value=(
          str(rng.integers(10**6, 10**7))
          if self.value == "number"
          else str(uuid.UUID(bytes=rng.bytes(16), version=4))
        ),
        percent=(
          float(DEPTHS[rng.integers(len(DEPTHS))])
          if self.depth is None
          else 100 * self.depth
        ),
        place=rng.random() if self.depth is None else self.depth,
      )
      haystack = NOISE if self.essays is None else self.essays
      if needle.key not in haystack and needle.value not in haystack:
        return needle

  def _prompt(self, needle: Needle, pieces: int) -> tuple[str, float]:
    """The prompt with so many lines or words, and how deep the needle is."""
    kind = self.value
    sentence = needle.sentence(kind)
    if self.essays is None:
      before, after = self._noise(needle, pieces)
      separator = "\n"
    else:
      before, after = self._essays(needle, pieces)
      separator = " "
    context = separator.join([*before, sentence, *after])
    start = len(separator.join([*before, ""]))
    depth = start / max(1, len(context) - len(sentence))
    return (
      f"A special magic {kind} is hidden within the following text. Make sure "
      f"to memorize it. I will quiz you about the {kind} afterwards.\n"
      f"{context}\n"
      f"What is the special magic {kind} for {needle.key} mentioned in the "
      f"provided text? The special magic {kind} for {needle.key} mentioned in "
      "the provided text is"
    ), depth

  def _noise(self, needle: Needle, lines: int) -> tuple[list[str], list[str]]:
    before = int(lines * needle.place)
    return [NOISE] * before, [NOISE] * (lines - before)

  def _essays(self, needle: Needle, count: int) -> tuple[list[str], list[str]]:
    words, ends = self._words
    if count > len(words):  # start over
      repeats = -(-count // len(words))
      words, ends = words * repeats, np.tile(ends, repeats)
    words = words[:count]
    starts = np.flatnonzero(ends[: count - 1]) + 1
    borders = [0, *starts.tolist(), count]
    sentences = len(borders) - 1
    cut = borders[int(sentences * needle.percent / 100)]
    return words[:cut], words[cut:]

  @functools.cached_property
  def _words(self) -> tuple[list[str], np.ndarray]:
    """The words of the essays, and which of them end a sentence."""
    words = (self.essays or "").split()
    ends = [
      word.rstrip("\"')]}”’").endswith((".", "!", "?")) and word not in TITLES
      for word in words
    ]
    return words, np.array(ends, bool)
