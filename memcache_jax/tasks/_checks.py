"""Argument checks shared by the tasks."""

import numbers
from typing import Any

import numpy as np


def check_integer(name: str, value: Any, at_least: int) -> None:
  """Raises ValueError unless the value is a whole number, large enough."""
  right_kind = isinstance(value, numbers.Integral) and not isinstance(
    value, bool
  )
  if not right_kind or value < at_least:
    raise ValueError(
      f"`{name}` must be an integer of at least {at_least}: got {value!r}."
    )


def check_generator(rng: Any) -> None:
  """Raises ValueError unless it is a NumPy generator."""
  if not isinstance(rng, np.random.Generator):
    raise ValueError(
      f"`rng` must be an np.random.Generator: got a {type(rng).__name__}."
    )


def check_real(name: str, value: Any, low: float, high: float) -> None:
  """Raises ValueError unless the value is a number of this range."""
  right_kind = isinstance(value, int | float | np.integer | np.floating)
  if isinstance(value, bool) or not right_kind or not low <= value <= high:
    raise ValueError(
      f"`{name}` must be a number from {low:g} to {high:g}: got {value!r}."
    )


def check_text(name: str, value: Any) -> None:
  """Raises ValueError unless the value is text with a word in it."""
  if not isinstance(value, str) or not value.strip():
    shown = type(value).__name__ if not isinstance(value, str) else repr(value)
    raise ValueError(f"`{name}` must be a text with words: got {shown}.")
