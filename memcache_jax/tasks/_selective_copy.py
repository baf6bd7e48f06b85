"""Selective copying."""

from dataclasses import dataclass

import numpy as np

from memcache_jax.tasks._base import Batch
from memcache_jax.tasks._checks import check_generator, check_integer
from memcache_jax.tasks._mqar import distinct


@dataclass(frozen=True, kw_only=True)
class SelectiveCopy:
  """Selective copying: the tokens between the noise, in order.

  Tokens to copy lie at random places among noise (id 0). At the end stand as
  many markers (the last id), and the targets there are the tokens in their
  order. Distances vary, so a fixed filter cannot do it. Source: Jing et al.,
  arXiv 1706.02761 ("denoise"); Gu and Dao, arXiv 2312.00752, section 4.1.1,
  with length 4096, 16 tokens to copy and 16 ids, which are the defaults. That
  paper does not say whether its length counts the markers; this one does.

  Attributes:
    length: tokens per row, markers included.
    num_copied: tokens to copy.
    vocab_size: number of ids, noise and marker included.

  Raises:
    ValueError: for sizes that do not go together.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.tasks import SelectiveCopy
    >>> task = SelectiveCopy(length=10, num_copied=3, vocab_size=8)
    >>> batch = task.batch(np.random.default_rng(0), 1)
    >>> print(batch.tokens, batch.targets)
    [[6 4 4 0 0 0 0 7 7 7]] [[0 0 0 0 0 0 0 6 4 4]]
  """

  length: int = 4096
  num_copied: int = 16
  vocab_size: int = 16

  def __post_init__(self):
    check_integer("num_copied", self.num_copied, 1)
    check_integer("vocab_size", self.vocab_size, 3)
    check_integer("length", self.length, 2 * self.num_copied)

  def batch(self, rng: np.random.Generator, batch_size: int) -> Batch:
    """Draws rows.

    Args:
      rng: source of randomness.
      batch_size: number of rows.
    """
    check_generator(rng)
    check_integer("batch_size", batch_size, 1)
    copied = rng.integers(
      1,
      self.vocab_size - 1,
      size=(batch_size, self.num_copied),
      dtype=np.int32,
    )
    context = self.length - self.num_copied
    places = distinct(rng, np.ones(context), batch_size, self.num_copied)
    shape = (batch_size, self.length)
    tokens = np.zeros(shape, np.int32)
    np.put_along_axis(tokens, np.sort(places, axis=1), copied, axis=1)
    tokens[:, context:] = self.vocab_size - 1
    targets = np.zeros(shape, np.int32)
    targets[:, context:] = copied
    answer_mask = np.zeros(shape, bool)
    answer_mask[:, context:] = True
    return Batch(tokens, targets, answer_mask, np.ones(shape, bool))
