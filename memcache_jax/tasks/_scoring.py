"""Scores of exact matches, all from 0 to 1."""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memcache_jax.tasks._base import Batch

_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(
  outputs: Sequence[str], answers: Sequence[Sequence[str]]
) -> float:
  """Mean share of the answers that an output contains, in any case of letters.

  The score of RULER (Hsieh et al., arXiv 2404.06654), from 0 to 1. As there,
  control characters in an output count as line breaks.

  Args:
    outputs: texts that the model wrote.
    answers: for each, the strings to be found.

  Raises:
    ValueError: if the numbers differ, are 0, or a row has no answer.

  Example:
    >>> from memcache_jax.tasks import string_match_all
    >>> string_match_all([" 4711, I think.", "no"], [["4711"], ["12", "13"]])
    0.5
  """
  return float(np.mean([np.mean(row) for row in _found(outputs, answers)]))


def string_match_any(
  outputs: Sequence[str], answers: Sequence[Sequence[str]]
) -> float:
  """Share of outputs that contain one of their answers, in any case.

  The score of SWDE, FDA, SQuAD and the like in recall studies (Arora et al.,
  arXiv 2407.05483), from 0 to 1.

  Args:
    outputs: texts that the model wrote.
    answers: for each, the strings of which one must be found.

  Raises:
    ValueError: if the numbers differ, are 0, or a row has no answer.

  Example:
    >>> from memcache_jax.tasks import string_match_any
    >>> string_match_any([" in paris.", "no"], [["Paris", "Lutetia"], ["yes"]])
    0.5
  """
  return float(np.mean([any(row) for row in _found(outputs, answers)]))


def token_accuracy(predictions: npt.ArrayLike, batch: Batch) -> float:
  """Share of answer tokens that are right, all rows together.

  The score of MQAR (Arora et al., arXiv 2312.04927).

  Args:
    predictions: ids [b t], the likeliest at every place, from `batch.tokens`.
    batch: the rows they were made from.

  Raises:
    ValueError: if the shapes differ or nothing is asked.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.tasks import MQAR, token_accuracy
    >>> batch = MQAR(length=8, num_pairs=2).batch(np.random.default_rng(0), 3)
    >>> token_accuracy(batch.targets, batch)
    1.0
  """
  return float(_right(predictions, batch)[batch.answer_mask].mean())


def exact_match(predictions: npt.ArrayLike, batch: Batch) -> float:
  """Share of rows whose answer tokens are all right.

  A row counts exactly if greedy decoding would have written the continuation:
  up to a first mistake both read the same tokens.

  Args:
    predictions: ids [b t], the likeliest at every place, from `batch.tokens`.
    batch: the rows they were made from.

  Raises:
    ValueError: if the shapes differ or nothing is asked.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.tasks import MQAR, exact_match
    >>> batch = MQAR(length=8, num_pairs=2).batch(np.random.default_rng(0), 3)
    >>> exact_match(batch.targets, batch)
    1.0
  """
  right = _right(predictions, batch) | ~batch.answer_mask
  return float(right.all(axis=1).mean())


def _found(
  outputs: Sequence[str], answers: Sequence[Sequence[str]]
) -> list[list[bool]]:
  """Which answers each output contains."""
  if not 0 < len(outputs) == len(answers):
    raise ValueError(
      "`outputs` and `answers` must have as many rows, at least one: got "
      f"{len(outputs)} and {len(answers)}."
    )
  rows = []
  for output, wanted in zip(outputs, answers, strict=True):
    if isinstance(wanted, str) or not wanted or not all(wanted):
      raise ValueError(
        "`answers` must hold a sequence of texts, none empty, for each "
        f"output: got {wanted!r} in row {len(rows)}."
      )
    text = _CONTROL.sub("\n", output).lower()
    rows.append([answer.lower() in text for answer in wanted])
  return rows


def _right(predictions: npt.ArrayLike, batch: Batch) -> np.ndarray:
  predictions = np.asarray(predictions)
  if predictions.shape != batch.targets.shape:
    raise ValueError(
      f"`predictions` must have shape {batch.targets.shape}, that of the "
      f"targets: got {predictions.shape}."
    )
  if not batch.answer_mask.any():
    raise ValueError("`batch` must ask something: its answer mask is empty.")
  return predictions == batch.targets
