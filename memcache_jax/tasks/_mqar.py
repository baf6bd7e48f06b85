"""Multi-query associative recall."""

from dataclasses import dataclass

import numpy as np

from memcache_jax.tasks._base import Batch
from memcache_jax.tasks._checks import (
  check_generator,
  check_integer,
  check_real,
)


@dataclass(frozen=True, kw_only=True)
class MQAR:
  r"""Multi-query associative recall, as in Zoology.

  A row begins with D pairs, :math:`k_1 v_1 \dots k_D v_D`: distinct keys from
  the lower half of the vocabulary without 0, distinct values from the upper
  half. The rest is S = (length - 2 D) / 2 slots of two tokens. Each key comes
  back once, as the first token of a slot, and the target there is its value,
  which does not follow in the input. Slots are drawn without replacement,

  .. math:: P(\text{slot } s) \propto s^{a - 1}, \quad s = 1, \dots, S

  so that most questions come soon and some late. Source: Arora et al., arXiv
  2312.04927, section 3 and appendix; the details are those of the published
  generator (github.com/HazyResearch/zoology). Published lengths and numbers
  of pairs: (64, 4), (128, 8), (256, 16), (512, 64) with blank fillers.

  Attributes:
    length: tokens per row, even and below `vocab_size`.
    num_pairs: D, at most a quarter of `length`.
    vocab_size: number of ids.
    power: a, from 0 (most questions soon) to 1 (all slots equally likely)
      and above.
    random_fillers: whether what is left blank in the rest of the row is drawn
      from all ids, keys and values included, or stays 0.

  Raises:
    ValueError: for sizes that do not go together.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.tasks import MQAR
    >>> task = MQAR(length=8, num_pairs=2, vocab_size=16, random_fillers=False)
    >>> batch = task.batch(np.random.default_rng(0), 2)
    >>> batch.tokens
    array([[ 4, 14,  3, 15,  4,  0,  3,  0],
           [ 5, 15,  7, 11,  5,  0,  7,  0]], dtype=int32)
    >>> batch.targets
    array([[ 0,  0,  0,  0, 14,  0, 15,  0],
           [ 0,  0,  0,  0, 15,  0, 11,  0]], dtype=int32)
  """

  length: int
  num_pairs: int
  vocab_size: int = 8192
  power: float = 0.01
  random_fillers: bool = True

  def __post_init__(self):
    check_integer("length", self.length, 4)
    check_integer("num_pairs", self.num_pairs, 1)
    check_integer("vocab_size", self.vocab_size, 1)
    if self.length % 2:
      raise ValueError(f"`length` must be even: got {self.length}.")
    if 4 * self.num_pairs > self.length:
      raise ValueError(
        f"`num_pairs` must be at most a quarter of length={self.length}: got "
        f"{self.num_pairs}."
      )
    if self.vocab_size <= self.length:
      raise ValueError(
        f"`vocab_size` must be above length={self.length}: got "
        f"{self.vocab_size}."
      )
    check_real("power", self.power, 0, 100)

  def batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
    """Draws rows.

    Args:
      rng: source of randomness.
      batch_size: number of rows.
    """
    check_generator(rng)
    check_integer("batch_size", batch_size, 1)
    half, pairs = self.vocab_size // 2, self.num_pairs
    context = 2 * pairs
    keys = 1 + distinct(rng, np.ones(half - 1), batch_size, pairs)
    values = half + distinct(
      rng, np.ones(self.vocab_size - half), batch_size, pairs
    )
    slot = np.arange(1, (self.length - context) // 2 + 1)
    slots = distinct(rng, slot ** (self.power - 1), batch_size, pairs)
    asked = context + 2 * slots

    shape = (batch_size, self.length)
    tokens = np.zeros(shape, np.int32)
    tokens[:, 0:context:2] = keys
    tokens[:, 1:context:2] = values
    np.put_along_axis(tokens, asked, keys.astype(np.int32), axis=1)
    if self.random_fillers:
      fillers = rng.integers(self.vocab_size, size=shape, dtype=np.int32)
      tokens = np.where(tokens == 0, fillers, tokens)
    targets = np.zeros(shape, np.int32)
    np.put_along_axis(targets, asked, values.astype(np.int32), axis=1)
    answer_mask = np.zeros(shape, bool)
    np.put_along_axis(answer_mask, asked, True, axis=1)
    return Batch(tokens, targets, answer_mask, np.ones(shape, bool))


def distinct(
  rng: np.random.Generator, weights: np.ndarray, rows: int, count: int
) -> np.ndarray:
  """Draws indices without replacement, each row on its own.

  Clocks with these rates ring in the order in which one would draw one after
  another in proportion to the weights that are left; so the first to ring are
  the draws, in order, and all rows are drawn at once.

  Args:
    weights: of the indices, [n].
    count: draws per row.

  Returns:
    Indices [rows count].
  """
  times = rng.standard_exponential((rows, len(weights))) / weights
  first = np.argpartition(times, count - 1, axis=1)[:, :count]
  order = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
  return np.take_along_axis(first, order, axis=1)
