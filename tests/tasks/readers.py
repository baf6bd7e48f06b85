"""Models that need no training: they read the prompt as a person would."""

import re
from collections.abc import Callable, Iterator

import numpy as np

from memcache_jax.tasks import Batch

TextReader = Callable[[str], str]


def find_needle(text: str) -> str:
  """Answers a question about a magic number or uuid, or says nothing."""
  key = re.search(r"for (\S+) mentioned in the provided text is$", text)
  assert key, text[-200:]
  facts = re.findall(
    rf"One of the special magic \w+ for {re.escape(key[1])} is: (\S+)\.", text
  )
  assert len(facts) <= 1
  return "".join(facts)


def find_line(text: str) -> str:
  """Completes the last line `Name:` from an earlier line `Name: value`."""
  attribute = re.split(r"\n|\. ", text)[-1]
  assert attribute.endswith(":")
  found = re.search(rf"^{re.escape(attribute)} (.*?)\.?$", text, re.MULTILINE)
  return found[1] if found else ""


def last_quarter(reader: TextReader) -> TextReader:
  """The same reader when only the end of the prompt is seen."""
  return lambda text: reader(text[-(len(text) // 4) :])


def recall_pairs(tokens: np.ndarray) -> Iterator[int]:
  """For each token, what followed its first occurrence, or 0."""
  follows: dict[int, int] = {}
  for place, token in enumerate(tokens.tolist()):
    yield follows.get(token, 0)
    if place:
      follows.setdefault(int(tokens[place - 1]), token)


def recall(batch: Batch, start: int = 0) -> np.ndarray:
  """Predictions of a reader that sees tokens from `start` on."""
  seen = np.zeros_like(batch.tokens)
  for row, tokens in enumerate(batch.tokens[:, start:]):
    seen[row, start:] = list(recall_pairs(tokens))
  return seen
