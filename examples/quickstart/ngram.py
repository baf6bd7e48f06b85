r"""Witten-Bell n-grams over bytes: the numbers a language model must beat.

An n-gram of order o predicts a byte from the o bytes before it. Witten and
Bell (1991) mix it with the next lower order, trusting a context c by how often
it was seen, N(c), against how many different bytes followed it, T(c):

.. math::
  p_o(x | c) = \frac{N(c x) + T(c)\, p_{o-1}(x | c')}{N(c) + T(c)}

where c' is c without its oldest byte, and p_{-1} is uniform. A context that
never occurred leaves the decision to the lower order.
"""

import numpy as np


def bits_per_byte(train: np.ndarray, test: np.ndarray, order: int) -> float:
  """Mean of -log2 p over all bytes of a text but its first.

  Args:
    train: uint8 text to count in.
    test: uint8 text to predict.
    order: bytes of context, 0 to 6.
  """
  return float(-np.log2(probabilities(train, test, order)[1:]).mean())


def probabilities(
  train: np.ndarray, test: np.ndarray, order: int
) -> np.ndarray:
  """p_order of every byte of `test`; its first bytes have shorter contexts."""
  p = np.full(len(test), 1 / 256)
  for o in range(order + 1):
    grams, gram_counts = np.unique(windows(train, o + 1), return_counts=True)
    contexts, first, followers = np.unique(
      grams >> 8, return_index=True, return_counts=True
    )
    totals = np.add.reduceat(gram_counts, first)

    seen = windows(test, o + 1)
    n_gram = look_up(grams, gram_counts, seen)
    n_context = look_up(contexts, totals, seen >> 8)
    t_context = look_up(contexts, followers, seen >> 8)
    lower = p[o:]
    mixed = (n_gram + t_context * lower) / np.maximum(n_context + t_context, 1)
    p[o:] = np.where(n_context > 0, mixed, lower)
  return p


def windows(text: np.ndarray, width: int) -> np.ndarray:
  """Every `width` neighbouring bytes as one integer, the last byte lowest."""
  packed = np.zeros(len(text) - width + 1, np.int64)
  for offset in range(width):
    packed = packed << 8 | text[offset : len(text) - width + 1 + offset]
  return packed


def look_up(
  keys: np.ndarray, values: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
  """The value at each wanted key, 0 where there is none; keys are sorted."""
  place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
  return np.where(keys[place] == wanted, values[place], 0)
