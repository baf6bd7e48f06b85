"""Argument checks shared by the ops; every error names what came."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcache_jax.array_typing import Array, State


def check_shapes(specs: Mapping[str, tuple[Array | None, str]]) -> None:
  """Raises ValueError unless all arrays agree on every axis letter.

  Args:
    specs: argument name -> (array or None, axis letters such as "b t n k");
      a digit stands for an axis of exactly that size.
  """
  sizes: dict[str, tuple[int, str]] = {}
  for name, (array, letters) in specs.items():
    if array is None:
      continue
    if not isinstance(array, jax.Array | np.ndarray):
      raise ValueError(
        f"`{name}` must be an array with axes ({letters}): got a "
        f"{type(array).__name__}."
      )
    axes = letters.split()
    if array.ndim != len(axes):
      raise ValueError(
        f"`{name}` must have axes ({letters}): got shape {array.shape}."
      )
    for letter, size in zip(axes, array.shape, strict=True):
      if letter.isdigit():
        sizes.setdefault(letter, (int(letter), "the op"))
      expected, owner = sizes.setdefault(letter, (size, name))
      if expected != size:
        raise ValueError(
          f"`{name}` must have axes ({letters}) with {letter}={expected} as "
          f"in `{owner}`: got shape {array.shape}."
        )


def check_given(**arrays: Array | None) -> None:
  """Raises ValueError for an array that is None or has no rows."""
  for name, array in arrays.items():
    if array is None:
      raise ValueError(f"`{name}` must be an array: got None.")
    if array.shape[:1] == (0,):
      raise ValueError(
        f"`{name}` must have at least one row: got shape {array.shape}."
      )


def check_integers(**arrays: Array) -> None:
  """Raises ValueError for an array that is not of an integer dtype."""
  for name, array in arrays.items():
    if not jnp.issubdtype(array.dtype, jnp.integer):
      raise ValueError(
        f"`{name}` must have an integer dtype: got {array.dtype}."
      )


def check_floating(**arrays: Array | None) -> None:
  """Raises ValueError for an array that is not of a floating dtype."""
  for name, array in arrays.items():
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(
        f"`{name}` must have a floating dtype: got {array.dtype}."
      )


def check_same_dtype(**arrays: Array) -> None:
  """Raises ValueError unless all arrays have one dtype."""
  dtypes = {name: array.dtype for name, array in arrays.items()}
  if len(set(dtypes.values())) > 1:
    names = ", ".join(f"`{name}`" for name in dtypes)
    raise ValueError(
      f"{names} must have the same dtype: got "
      + ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
      + "."
    )


def check_bool(**arrays: Array | None) -> None:
  """Raises ValueError for an array that is not boolean."""
  for name, array in arrays.items():
    if array is not None and array.dtype != jnp.bool_:
      raise ValueError(f"`{name}` must be boolean: got {array.dtype}.")


def check_positive(**values: int) -> None:
  """Raises ValueError for a value that is not a positive int."""
  for name, value in values.items():
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f"`{name}` must be an int of at least 1: got {value!r}.")


def check_choice(**values: tuple[object, tuple[object, ...]]) -> None:
  """Raises ValueError for a value, given with its choices, not among them."""
  for name, (value, choices) in values.items():
    if value not in choices:
      raise ValueError(f"`{name}` must be one of {choices}: got {value!r}.")


def check_mapping(kind: type, **values: Any) -> None:
  """Raises ValueError for a value that does not map names to such things."""
  for name, value in values.items():
    if not isinstance(value, Mapping) or not all(
      isinstance(key, str) and isinstance(item, kind)
      for key, item in value.items()
    ):
      raise ValueError(
        f"`{name}` must map names to {kind.__name__}: got {value!r}."
      )


def check_number(
  *, low: float, high: float = math.inf, open_low: bool = False, **values: float
) -> None:
  """Raises ValueError for a value that is not a number in [low, high].

  Args:
    low: the least.
    high: the largest; infinity itself is never allowed.
    open_low: `low` itself is not allowed.
    values: what to check, by name.
  """
  for name, value in values.items():
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if number and math.isfinite(value) and low <= value <= high:
      if not (open_low and value == low):
        continue
    limits = f"at least {low}" if not open_low else f"above {low}"
    if high < math.inf:
      limits += f" and at most {high}"
    raise ValueError(f"`{name}` must be a number {limits}: got {value!r}.")


def check_dtype(**values: Any) -> None:
  """Raises ValueError for a value that is not a floating dtype."""
  for name, value in values.items():
    try:
      dtype = None if value is None else jnp.dtype(value)
    except TypeError:
      dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"`{name}` must be a floating dtype: got {value!r}.")


def check_state(state: State, *expected: State) -> None:
  """Raises ValueError unless a state has the leaves that are expected.

  Args:
    state: what came.
    *expected: trees of arrays or of shapes and dtypes, [b ...], that are alike
      but for how long a state may grow: where their sizes differ, any will do.
  """
  want, structure = jax.tree_util.tree_flatten_with_path(expected[0])
  others = [jax.tree.leaves(tree) for tree in expected]
  got = jax.tree.leaves(state)
  if jax.tree.structure(state) != structure:
    raise ValueError(
      "`state` must come from the same kind of memory, "
      f"{_leaves_of(expected[0])}: got {_leaves_of(state)}."
    )
  for (path, leaf), x, *alike in zip(want, got, *others, strict=True):
    shape, dtype = jnp.shape(x), getattr(x, "dtype", type(x).__name__)
    sizes = [
      set(sizes) for sizes in zip(*(y.shape for y in alike), strict=True)
    ]
    fits = len(shape) == len(sizes) and all(
      len(known) > 1 or size in known
      for size, known in zip(shape, sizes, strict=True)
    )
    if not fits or dtype != leaf.dtype:
      wanted = ", ".join(
        "any" if len(known) > 1 else str(*known) for known in sizes
      )
      raise ValueError(
        f"`state{jax.tree_util.keystr(path)}` must be {leaf.dtype} of shape "
        f"({wanted}): got {dtype} of shape {shape}."
      )


def _leaves_of(tree: State) -> str:
  paths, _ = jax.tree_util.tree_flatten_with_path(tree)
  names = [jax.tree_util.keystr(path) for path, _ in paths]
  return f"a {type(tree).__name__} of leaves [{', '.join(filter(None, names))}]"
