"""Text to ids and back, behind one small protocol.

Bytes need nothing. The others read a file and need the extra `text`; each is
imported only when it is asked for.
"""

import base64
import importlib
import pathlib
from types import ModuleType
from typing import Protocol

import numpy as np

from examples.workdir import InputError


class Tokenizer(Protocol):
  """What the data pipeline and generation need.

  Attributes:
    vocab_size: ids are below it.
    bos_id: stands before a document.
    eos_id: stands behind one.
  """

  vocab_size: int
  bos_id: int
  eos_id: int

  def encode(self, text: str) -> np.ndarray:
    """Ids of a text, without marks, int32."""
    ...

  def decode(self, ids: np.ndarray) -> str:
    """The text of ids; marks are left out."""
    ...


def load(name: str) -> Tokenizer:
  """The tokenizer of a file, by its ending, or "bytes".

  Args:
    name: "bytes", or a file: .model (SentencePiece), .json (tokenizers) or
      .tiktoken (ranks of tiktoken, with the pattern of GPT-4).

  Raises:
    InputError: when there is no such tokenizer, or its package is missing.
  """
  if name == "bytes":
    return ByteTokenizer()
  kinds = {
    ".model": SentencePieceTokenizer,
    ".json": HuggingFaceTokenizer,
    ".tiktoken": TiktokenTokenizer,
  }
  kind = kinds.get(pathlib.Path(name).suffix)
  if kind is None or not pathlib.Path(name).is_file():
    raise InputError(
      "data.tokenizer must be bytes or an existing file that ends in .model, "
      f".json or .tiktoken: got {name!r}"
    )
  return kind(name)


class ByteTokenizer:
  """The bytes of UTF-8, and two marks."""

  vocab_size = 258
  bos_id = 256
  eos_id = 257

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def decode(self, ids: np.ndarray) -> str:
    ids = np.asarray(ids)
    return bytes(ids[ids < 256].astype(np.uint8)).decode(errors="replace")


class SentencePieceTokenizer:
  """A SentencePiece model; without marks of its own, two more ids are made."""

  def __init__(self, path: str):
    package = _import("sentencepiece")
    self._model = package.SentencePieceProcessor(model_file=path)
    size = self._model.vocab_size()
    marks = (self._model.bos_id(), self._model.eos_id())
    self.bos_id, self.eos_id, self.vocab_size = _marks(size, *marks)
    self._size = size

  def encode(self, text: str) -> np.ndarray:
    return np.array(self._model.encode(text), np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return self._model.decode([int(i) for i in ids if i < self._size])


class HuggingFaceTokenizer:
  """A `tokenizer.json`; its marks are `<s>` and `</s>`, or are made."""

  def __init__(self, path: str):
    self._model = _import("tokenizers").Tokenizer.from_file(path)
    size = self._model.get_vocab_size()
    marks = [self._model.token_to_id(mark) for mark in ("<s>", "</s>")]
    marks = [-1 if mark is None else mark for mark in marks]
    self.bos_id, self.eos_id, self.vocab_size = _marks(size, *marks)

  def encode(self, text: str) -> np.ndarray:
    return np.array(
      self._model.encode(text, add_special_tokens=False).ids, np.int32
    )

  def decode(self, ids: np.ndarray) -> str:
    return self._model.decode([int(i) for i in ids])


class TiktokenTokenizer:
  """Ranks in tiktoken's format: a token in base64 and its rank a line."""

  # How GPT-4 cuts text before merging.
  PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
  )

  def __init__(self, path: str):
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    pairs = [line.split() for line in lines if line]
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    self._size = max(ranks.values()) + 1
    self._model = _import("tiktoken").Encoding(
      pathlib.Path(path).stem,
      pat_str=self.PATTERN,
      mergeable_ranks=ranks,
      special_tokens={},
    )
    self.bos_id, self.eos_id, self.vocab_size = _marks(self._size, -1, -1)

  def encode(self, text: str) -> np.ndarray:
    return np.array(self._model.encode_ordinary(text), np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return self._model.decode([int(i) for i in ids if i < self._size])


def _marks(size: int, bos: int, eos: int) -> tuple[int, int, int]:
  """Ids of both marks, new ones where they are -1, and the number of ids."""
  if bos < 0:
    bos, size = size, size + 1
  if eos < 0:
    eos, size = size, size + 1
  return bos, eos, size


def _import(package: str) -> ModuleType:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise InputError(
      f"this tokenizer needs the package {package}: "
      f'pip install -e ".[text]" ({error})'
    ) from None
