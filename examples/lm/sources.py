"""Files of text as documents that can be read in any order."""

import bisect
import functools
import glob
import json
import lzma
import os
import pathlib
import threading

import grain
import numpy as np

from examples.workdir import InputError


def open_source(
  pattern: str, text_key: str = "text", separator: str = ""
) -> grain.sources.RandomAccessDataSource:
  """Documents of all files that match, in the order of their names.

  Args:
    pattern: such as `shards/*.parquet`. The ending says what the files are:
      .txt, .txt.xz, .jsonl, .parquet or .array_record.
    text_key: field of the text, in JSON lines and parquet.
    separator: what parts documents in a text file; empty for one each.

  Raises:
    InputError: when nothing matches, or files are of several or no kinds.
  """
  paths = sorted(glob.glob(pattern))
  if not paths:
    raise InputError(f"no file matches {pattern}")
  kinds = {"".join(_endings(path)) for path in paths}
  match sorted(kinds):
    case [".txt"] | [".txt.xz"] | [".txt", ".txt.xz"]:
      return TextSource(paths, separator)
    case [".jsonl"]:
      return JsonlSource(paths, text_key)
    case [".parquet"]:
      return ParquetSource(paths, text_key)
    case [".array_record"]:
      return ArrayRecordSource(paths)
  raise InputError(
    f"{pattern} must match files of one kind, .txt, .txt.xz, .jsonl, .parquet "
    f"or .array_record: got {', '.join(sorted(kinds))}"
  )


def _endings(path: str) -> list[str]:
  endings = pathlib.Path(path).suffixes
  return endings[-2:] if endings[-1:] == [".xz"] else endings[-1:]


class TextSource(grain.sources.RandomAccessDataSource):
  """Text files, held in memory."""

  def __init__(self, paths: list[str], separator: str):
    self._paths = paths
    self._documents = []
    for path in paths:
      data = pathlib.Path(path).read_bytes()
      try:
        text = (
          lzma.decompress(data) if path.endswith(".xz") else data
        ).decode()
      except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
      parts = text.split(separator) if separator else [text]
      self._documents += [part for part in parts if part.strip()]

  def __len__(self) -> int:
    return len(self._documents)

  def __getitem__(self, index: int) -> str:
    return self._documents[index]

  def __repr__(self) -> str:
    return f"TextSource({self._paths})"


class JsonlSource(grain.sources.RandomAccessDataSource):
  """JSON lines, found again by where they begin; one object a line."""

  def __init__(self, paths: list[str], text_key: str):
    self._paths = paths
    self._text_key = text_key
    self._starts = [_line_starts(path) for path in paths]
    self._first = np.cumsum([0, *(len(s) - 1 for s in self._starts)])

  def __len__(self) -> int:
    return int(self._first[-1])

  def __getitem__(self, index: int) -> str:
    file = bisect.bisect_right(self._first, index) - 1
    line = index - self._first[file]
    start, end = self._starts[file][line : line + 2]
    handle = os.open(self._paths[file], os.O_RDONLY)
    try:
      data = os.pread(handle, int(end - start), int(start))
    finally:
      os.close(handle)
    return _text_of(data, self._text_key, f"{self._paths[file]}:{line + 1}")

  def __repr__(self) -> str:
    return f"JsonlSource({self._paths}, {self._text_key!r})"


def _line_starts(path: str) -> np.ndarray:
  """Where every line that is not empty begins, and where the last one ends."""
  starts, place = [], 0
  with open(path, "rb") as file:
    for line in file:
      if line.strip():
        starts.append(place)
      place += len(line)
  return np.array([*starts, place], np.int64)


def _text_of(data: bytes, key: str, where: str) -> str:

  try:
    return json.loads(data)[key]
  except (ValueError, KeyError, TypeError) as error:
    raise InputError(
      f"{where} must be an object with a text in {key!r}: {error!r}"
    ) from None


class ParquetSource(grain.sources.RandomAccessDataSource):
  """Parquet files, of which only the column of the text is decoded.

  A row is read with all its row group; the last few of those are kept. Small
  row groups shuffle faster.
  """

  def __init__(self, paths: list[str], text_key: str):
    try:
      import pyarrow.parquet
    except ImportError as error:
      raise InputError(
        f'parquet files need pyarrow: pip install -e ".[text]" ({error})'
      ) from None
    self._open = functools.cache(pyarrow.parquet.ParquetFile)
    self._paths, self._text_key = paths, text_key
    self._lock = threading.Lock()
    self._groups, sizes = [], [0]
    for path in paths:
      metadata = self._open(path).metadata
      if text_key not in self._open(path).schema_arrow.names:
        raise InputError(f"{path} has no column {text_key!r}")
      for group in range(metadata.num_row_groups):
        self._groups.append((path, group))
        sizes.append(metadata.row_group(group).num_rows)
    self._first = np.cumsum(sizes)
    self._read = functools.lru_cache(maxsize=16)(self._read_group)

  def _read_group(self, path: str, group: int):
    table = self._open(path).read_row_group(group, columns=[self._text_key])
    return table.column(0)

  def __len__(self) -> int:
    return int(self._first[-1])

  def __getitem__(self, index: int) -> str:
    group = bisect.bisect_right(self._first, index) - 1
    with self._lock:
      column = self._read(*self._groups[group])
    return column[int(index - self._first[group])].as_py()

  def __repr__(self) -> str:
    return f"ParquetSource({self._paths}, {self._text_key!r})"


class ArrayRecordSource(grain.sources.RandomAccessDataSource):
  """ArrayRecord files whose records are texts in UTF-8."""

  def __init__(self, paths: list[str]):
    self._paths = paths
    self._records = grain.sources.ArrayRecordDataSource(paths)

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> str:
    return self._records[index].decode()

  def __repr__(self) -> str:
    return f"ArrayRecordSource({self._paths})"
