"""Text in, batches of byte windows out."""

import hashlib
import lzma
import pathlib
import re
from dataclasses import dataclass

import grain
import numpy as np

from examples.workdir import InputError

EMBEDDED = pathlib.Path(__file__).parents[1] / "data" / "austen.txt.xz"
EMBEDDED_SHA256 = (
  "1f48a6d7751aa60776b8aacf34d3b6898c46f4ee0fd103d733dd04f45e761841"
)

# A line that is nothing but one of these opens each novel.
TITLES = (
  "EMMA",
  "MANSFIELD PARK",
  "NORTHANGER ABBEY",
  "Persuasion",
  "PRIDE AND PREJUDICE",
  "SENSE AND SENSIBILITY",
)
HELD_OUT_NOVEL = "Persuasion"

# Less than this trains nothing and measures nothing.
MIN_BYTES = 65_536


@dataclass(frozen=True)
class Corpus:
  """A text in two parts that share no byte.

  Attributes:
    train: bytes to learn from, uint8.
    held_out: bytes to measure on, uint8.
    description: what was held out, for people.
    sha256: of the whole text, to recognise it.
  """

  train: np.ndarray
  held_out: np.ndarray
  description: str
  sha256: str


def load(path: pathlib.Path | None) -> Corpus:
  """Reads a text file, or the embedded novels when the path is None."""
  return load_embedded() if path is None else load_file(path)


def load_embedded() -> Corpus:
  """Six novels by Jane Austen, of which a whole one is held out."""
  try:
    text = lzma.decompress(EMBEDDED.read_bytes())
  except (OSError, lzma.LZMAError) as error:
    raise InputError(f"cannot read {EMBEDDED}: {error}") from None
  sha256 = hashlib.sha256(text).hexdigest()
  if sha256 != EMBEDDED_SHA256:
    raise InputError(f"{EMBEDDED} is damaged: its SHA-256 is {sha256}")
  novels = split_novels(text)
  held_out = novels.pop(HELD_OUT_NOVEL)
  return Corpus(
    train=as_array(b"".join(novels.values())),
    held_out=as_array(held_out),
    description=f"the whole novel {HELD_OUT_NOVEL}",
    sha256=sha256,
  )


def split_novels(text: bytes) -> dict[str, bytes]:
  """Cuts the joined novels in front of their title lines."""
  starts = []
  for title in TITLES:
    found = [
      match.start()
      for match in re.finditer(rf"^{title}$".encode(), text, re.MULTILINE)
    ]
    if len(found) != 1:
      raise InputError(f"{len(found)} lines say {title!r}, expected one")
    starts += found
  if starts != sorted(starts) or starts[0] != 0:
    raise InputError(f"the novels are not in the order {TITLES}")
  ends = [*starts[1:], len(text)]
  return {
    title: text[start:end]
    for title, start, end in zip(TITLES, starts, ends, strict=True)
  }


def load_file(path: pathlib.Path) -> Corpus:
  """Any UTF-8 text; its last tenth is held out."""
  try:
    text = path.read_bytes()
  except OSError as error:
    raise InputError(f"cannot read {path}: {error.strerror}") from None
  if len(text) < MIN_BYTES:
    raise InputError(
      f"{path} is too short: {len(text):,} bytes, at least {MIN_BYTES:,} needed"
    )
  try:
    is_text = "\0" not in text.decode("utf-8")
  except UnicodeDecodeError:
    is_text = False
  if not is_text:
    raise InputError(f"{path} is not a text file in UTF-8")
  cut = len(text) - len(text) // 10
  return Corpus(
    train=as_array(text[:cut]),
    held_out=as_array(text[cut:]),
    description=f"the last tenth of {path.name}",
    sha256=hashlib.sha256(text).hexdigest(),
  )


def as_array(text: bytes) -> np.ndarray:
  return np.frombuffer(text, np.uint8)


class ByteWindows(grain.sources.RandomAccessDataSource):
  """A text as windows of `length` bytes, each with the byte that follows."""

  def __init__(self, text: np.ndarray, length: int):
    self._text = text
    self._length = length

  def __len__(self) -> int:
    return (len(self._text) - 1) // self._length

  def __getitem__(self, index: int) -> np.ndarray:
    if not 0 <= index < len(self):
      raise IndexError(index)
    start = index * self._length
    window = self._text[start : start + self._length + 1]
    return window.astype(np.int32)

  def __repr__(self) -> str:
    return f"ByteWindows({len(self._text)} bytes, length={self._length})"


def training_batches(
  text: np.ndarray, length: int, batch_size: int, seed: int
) -> grain.DatasetIterator:
  """Batches [b t+1] without end: every window once, then reshuffled.

  The iterator knows its place: saved and restored with the model, it goes on
  with the batch that would have come next. It uses no thread and no process,
  since slicing bytes is far faster than any model.
  """
  windows = grain.MapDataset.source(ByteWindows(text, length))
  batches = windows.seed(seed).shuffle().repeat().batch(batch_size)
  return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))
