"""What the tasks ask of a tokenizer, and those that need no file."""

import collections
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

# Letters, with a space before them, or any other character.
_PIECE = re.compile(r" ?[^\W\d_]+|.", re.DOTALL)


@runtime_checkable
class Tokenizer(Protocol):
  """Text to token ids and back.

  Two methods and a size, so that an adaptor for any library is a few lines.
  `encode` must add nothing of its own, such as a token for the beginning: the
  tasks encode the parts of a text and count on the sum.
  """

  @property
  def vocab_size(self) -> int:
    """Ids are at least 0 and below this."""
    ...

  def encode(self, text: str) -> Sequence[int]:
    """The ids of a text."""
    ...

  def decode(self, tokens: Sequence[int]) -> str:
    """The text of ids."""
    ...


@dataclass(frozen=True)
class ByteTokenizer:
  """The bytes of the text in UTF-8: 256 ids, nothing to train or to load.

  Example:
    >>> from memcache_jax.tasks import ByteTokenizer
    >>> ByteTokenizer().encode("a £")
    [97, 32, 194, 163]
    >>> ByteTokenizer().decode([97, 32, 194, 163])
    'a £'
  """

  vocab_size = 256

  def encode(self, text: str) -> list[int]:
    """The bytes of a text."""
    return list(text.encode())

  def decode(self, tokens: Sequence[int]) -> str:
    """The text of bytes; what is no UTF-8 becomes U+FFFD.

    Raises:
      ValueError: for an id that is no byte.
    """
    return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class WordTokenizer:
  """A token for each known word, and bytes for all else.

  A word is a run of letters with the space before it, if there is one. What is
  not known is spelled, and so are numbers, signs and line breaks: every text
  can be written and read back. For tests at small scale, whose texts have few
  words: they are about a quarter as long as in bytes.

  Attributes:
    words: id 256 and following; the ids below are the bytes.

  Raises:
    ValueError: for what is not a word, or is given twice.

  Example:
    >>> from memcache_jax.tasks import WordTokenizer
    >>> tokenizer = WordTokenizer.of_text("the sky, and the 42")
    >>> tokenizer.words
    ('the', ' sky', ' and', ' the')
    >>> tokenizer.encode("the sky is 42")
    [256, 257, 32, 105, 115, 32, 52, 50]
    >>> tokenizer.decode(tokenizer.encode("the sky is 42"))
    'the sky is 42'
  """

  words: tuple[str, ...]

  def __post_init__(self):
    for word in self.words:
      if not (isinstance(word, str) and _is_word(word)):
        raise ValueError(
          "`words` must be letters, with a space before them or not: got "
          f"{word!r}."
        )
    word, count = collections.Counter(("", *self.words)).most_common(1)[0]
    if count > 1:
      raise ValueError(f"`words` must differ: got {word!r} {count} times.")

  @classmethod
  def of_text(cls, text: str) -> Self:
    """Knows what a text has, in the order in which it first occurs."""
    return cls(tuple(filter(_is_word, dict.fromkeys(_PIECE.findall(text)))))

  @property
  def vocab_size(self) -> int:
    """256 and the number of words."""
    return 256 + len(self.words)

  def encode(self, text: str) -> list[int]:
    """The ids of a text."""
    tokens = []
    for piece in _PIECE.findall(text):
      token = self._ids.get(piece)
      tokens += piece.encode() if token is None else (token,)
    return tokens

  def decode(self, tokens: Sequence[int]) -> str:
    """The text of ids; bytes that are no UTF-8 become U+FFFD.

    Raises:
      ValueError: for an id that is neither a byte nor a word.
    """
    if bad := [x for x in tokens if not 0 <= x < self.vocab_size]:
      raise ValueError(
        f"`tokens` must be from 0 to {self.vocab_size - 1}: got {bad[0]}."
      )
    parts = (
      bytes([x]) if x < 256 else self.words[x - 256].encode() for x in tokens
    )
    return b"".join(parts).decode(errors="replace")

  @functools.cached_property
  def _ids(self) -> Mapping[str, int]:
    return {word: 256 + place for place, word in enumerate(self.words)}


def _is_word(piece: str) -> bool:
  """Whether it is a piece of more than a byte, which has an id already."""
  return piece.removeprefix(" ").isalpha() and len(piece.encode()) > 1
