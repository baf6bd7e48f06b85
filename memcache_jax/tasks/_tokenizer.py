"""What the tasks ask of a tokenizer, and the one that needs no file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
