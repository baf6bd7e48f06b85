"""Documents into rows of equal length, from any place in the stream.

A document of n + 1 tokens is n inputs, each with the token after it as target.
What does not fit into a row goes on in the next one, as a document of its own
to the model: its first input is the last target before the cut, so that every
token but the first of a document is a target exactly once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import grain
import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
  """Rows [b t], or one row [t].

  Attributes:
    tokens: inputs, int32.
    targets: the token after each, int32.
    mask: False where a row holds no token.
    starts: True at the first token of a document, or of the rest of one.
  """

  tokens: Any
  targets: Any
  mask: Any
  starts: Any

  @classmethod
  def empty(cls, *shape: int) -> "Batch":
    """Rows that hold nothing."""
    return cls(
      np.zeros(shape, np.int32),
      np.zeros(shape, np.int32),
      np.zeros(shape, bool),
      np.zeros(shape, bool),
    )

  def place(self, start: int, piece: np.ndarray) -> None:
    """Writes a piece of a document into one row."""
    part = slice(start, start + len(piece) - 1)
    self.tokens[part] = piece[:-1]
    self.targets[part] = piece[1:]
    self.mask[part] = True
    self.starts[start] = True


class Place(NamedTuple):
  """Where a stream is.

  Attributes:
    document: number of the document in the order of the stream.
    offset: inputs of it that are used up.
    row: rows that were already taken of what is packed from here.
  """

  document: int = 0
  offset: int = 0
  row: int = 0


class Reader:
  """Cuts documents into pieces, in order.

  Args:
    documents: tokens of document i, at least two, by its number i.
    place: where to go on.
  """

  def __init__(self, documents: grain.MapDataset, place: Place):
    self._documents = documents
    self.document, self.offset = place.document, place.offset
    self._held: tuple[int, np.ndarray] | None = None

  def remaining(self) -> int:
    """Inputs left of the document; 0 after the last document."""
    if self.document >= len(self._documents):
      return 0
    return len(self._tokens(self.document)) - 1 - self.offset

  def take(self, length: int) -> np.ndarray:
    """The next `length` inputs of the document, and one token more."""
    end = self.offset + length
    piece = self._tokens(self.document)[self.offset : end + 1]
    if self.remaining() == length:
      self.document, self.offset = self.document + 1, 0
    else:
      self.offset = end
    return piece

  @property
  def place(self) -> Place:
    return Place(self.document, self.offset)

  def _tokens(self, document: int) -> np.ndarray:
    if self._held is None or self._held[0] != document:
      self._held = document, self._documents[document]
    return self._held[1]


class Packing:
  """Base of the ways to pack: a few rows at a time."""

  def pack(self, reader: Reader) -> list[Batch]:
    """Fills rows; none after the last document."""
    raise NotImplementedError


@dataclass(frozen=True)
class Aligned(Packing):
  """Documents start at multiples of `align` tokens.

  Segments of a memory then never hold two documents, and the model needs no
  room for moving tokens about. Up to `align - 1` places behind a document stay
  empty.
  """

  length: int
  align: int

  def pack(self, reader: Reader) -> list[Batch]:
    row, start = Batch.empty(self.length), 0
    while start < self.length and (left := reader.remaining()):
      piece = reader.take(min(left, self.length - start))
      row.place(start, piece)
      start += -(-(len(piece) - 1) // self.align) * self.align
    return [row] if row.mask.any() else []


@dataclass(frozen=True)
class FirstFit(Packing):
  """Documents start anywhere; each goes into the first row with room for it.

  Attributes:
    length: tokens per row.
    max_documents: pieces of documents per row.
    open_rows: filled side by side, until a piece fits into none of them.
  """

  length: int
  max_documents: int
  open_rows: int = 8

  def pack(self, reader: Reader) -> list[Batch]:
    rows = [Batch.empty(self.length) for _ in range(self.open_rows)]
    used, count = [0] * self.open_rows, [0] * self.open_rows
    while left := reader.remaining():
      size = min(left, self.length)
      fits = [
        i
        for i in range(self.open_rows)
        if used[i] + size <= self.length and count[i] < self.max_documents
      ]
      if not fits:
        break
      rows[fits[0]].place(used[fits[0]], reader.take(size))
      used[fits[0]] += size
      count[fits[0]] += 1
    return [row for row, n in zip(rows, count, strict=True) if n]


class Rows(Iterator[Batch]):
  """Rows of one stream of documents; its place can be read and set."""

  def __init__(self, documents: grain.MapDataset, packing: Packing):
    self._documents = documents
    self._packing = packing
    self.seek(Place())

  def seek(self, place: Place) -> None:
    """Goes on with the row that came next when `place` was read."""
    self._begin, self._taken = place._replace(row=0), place.row
    self._reader = Reader(self._documents, place)
    self._rows: list[Batch] | None = None

  @property
  def place(self) -> Place:
    return self._begin._replace(row=self._taken)

  def __next__(self) -> Batch:
    if self._rows is None:
      self._rows = self._packing.pack(self._reader)
    if not self._rows:
      raise StopIteration
    row = self._rows[self._taken]
    self._taken += 1
    if self._taken == len(self._rows):
      self._begin, self._taken = self._reader.place, 0
      self._rows = None
    return row
