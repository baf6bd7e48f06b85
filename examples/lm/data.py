"""Text to batches: every row of the batch is a stream of its own.

Row r of every batch reads documents r, r + b, r + 2b, ... of b rows, shuffled
anew in every pass. What a row holds thus depends neither on the number of
processes nor on who reads it, and the place of a run in its data is three
numbers per row.
"""

from collections.abc import Sequence

import grain
import numpy as np

from examples.lm import sources
from examples.lm.packing import Aligned, Batch, FirstFit, Packing, Place, Rows
from examples.lm.settings import DataSettings, Settings
from examples.lm.tokenizers import Tokenizer
from examples.workdir import InputError
from memcache_jax.models import check_token_ids


class Part(grain.sources.RandomAccessDataSource):
  """The held-out documents of a source, every n-th, or all the others."""

  def __init__(self, source, every: int, held_out: bool):
    self._source, self._every, self._held_out = source, every, held_out

  def __len__(self) -> int:
    held_out = -(-len(self._source) // self._every)
    return held_out if self._held_out else len(self._source) - held_out

  def __getitem__(self, index: int) -> str:
    if self._held_out:
      return self._source[index * self._every]
    return self._source[index + index // (self._every - 1) + 1]

  def __repr__(self) -> str:
    return f"Part({self._source!r}, {self._every}, {self._held_out})"


class Tokenize(grain.transforms.Map):
  """Text to ids, between the marks of a beginning and an end."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer

  def map(self, text: str) -> np.ndarray:
    ids = self._tokenizer.encode(text)
    ends = (self._tokenizer.bos_id, self._tokenizer.eos_id)
    return np.concatenate([ends[:1], ids, ends[1:]]).astype(np.int32)


def documents(settings: DataSettings) -> tuple:
  """Sources of the training and of the held-out text.

  Raises:
    InputError: when there is none, or too little to hold anything out.
  """
  read = lambda path: sources.open_source(
    path, settings.text_key, settings.separator
  )
  source = read(settings.path)
  if settings.evaluation_path:
    return source, read(settings.evaluation_path)
  if len(source) < 2:
    raise InputError(
      f"{settings.path} holds {len(source)} documents, of which none can be "
      "held out: give data.evaluation_path"
    )
  parts = (Part(source, settings.held_out, x) for x in (False, True))
  return tuple(parts)


def packing(settings: Settings) -> Packing:
  """How documents share a row."""
  if settings.data.packing == "aligned":
    return Aligned(settings.length, settings.data.align)
  return FirstFit(settings.length, settings.data.max_documents)


class Batches(grain.IterDataset):
  """Batches of packed rows.

  Args:
    source: text of document i.
    tokenizer: makes ids of it.
    settings: of the run.
    rows: which rows of the batch this process reads.
    endless: whether to go through the documents again and again, in another
      order each time; or once, in order. A row whose documents are used up
      is then empty, and the last batch is followed by nothing.
  """

  def __init__(
    self,
    source,
    tokenizer: Tokenizer,
    settings: Settings,
    rows: Sequence[int],
    *,
    endless: bool,
  ):
    super().__init__()
    b = settings.batch_size
    if endless and len(source) < b:
      raise InputError(
        f"a batch of {b} rows needs {b} documents: there are {len(source)}"
      )
    check = settings.model.vocab_size
    if tokenizer.vocab_size > check:
      raise InputError(
        f"model.vocab_size must be at least that of the tokenizer, "
        f"{tokenizer.vocab_size}: got {check}"
      )
    self._vocab_size = check
    self._packing = packing(settings)
    self._length = settings.length
    self._streams = []
    for row in rows:
      stream = grain.MapDataset.source(source)[row::b]
      if endless:
        stream = stream.seed(settings.seed + row).shuffle().repeat()
      self._streams.append(stream.map(Tokenize(tokenizer)))

  def __iter__(self) -> grain.DatasetIterator:
    return _BatchIterator(
      [Rows(stream, self._packing) for stream in self._streams],
      self._length,
      self._vocab_size,
    )

  def __str__(self) -> str:
    return f"Batches({len(self._streams)} rows of {self._length})"


class _BatchIterator(grain.DatasetIterator):
  def __init__(self, streams: list[Rows], length: int, vocab_size: int):
    super().__init__()
    self._streams = streams
    self._length = length
    self._vocab_size = vocab_size

  def __next__(self) -> Batch:
    rows = [next(stream, None) for stream in self._streams]
    if all(row is None for row in rows):
      raise StopIteration
    batch = Batch.empty(len(rows), self._length)
    for name, array in vars(batch).items():
      for i, row in enumerate(rows):
        if row is not None:
          array[i] = getattr(row, name)
    for name in ("tokens", "targets"):
      check_token_ids(
        getattr(batch, name), self._vocab_size, batch.mask, name=name
      )
    return batch

  def get_state(self) -> dict:
    return {"places": [list(stream.place) for stream in self._streams]}

  def set_state(self, state: dict) -> None:
    for stream, place in zip(self._streams, state["places"], strict=True):
      stream.seek(Place(*place))


def iterator(dataset: Batches, prefetch: int) -> grain.DatasetIterator:
  """Iterates, making batches ahead of time in a thread."""
  if prefetch == 0:
    return iter(dataset)
  return iter(
    grain.experimental.ThreadPrefetchIterDataset(
      dataset, prefetch_buffer_size=prefetch
    )
  )
