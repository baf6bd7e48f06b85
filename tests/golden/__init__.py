"""Loader of the reference numbers in this folder; README.md describes them."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

FOLDER = pathlib.Path(__file__).parent


class Case(NamedTuple):
  """One case: what to compute, from what, and the float64 results."""

  name: str
  config: dict[str, Any]
  inputs: dict[str, np.ndarray]
  outputs: dict[str, np.ndarray]
  gradients: dict[str, np.ndarray]


def cases(match: str = "") -> Iterator[Case]:
  """Yields the cases whose name contains ``match``, in the manifest's order."""
  for entry in json.loads((FOLDER / "manifest.json").read_text()):
    if match not in entry["name"]:
      continue
    groups = {"in": {}, "out": {}, "grad": {}}
    with np.load(FOLDER / entry["file"]) as arrays:
      for key in arrays.files:
        group, name = key.split(".", 1)
        groups[group][name] = arrays[key]
    yield Case(entry["name"], entry["config"], *groups.values())


def error(x: Any, ref: np.ndarray) -> float:
  """``rms(x - ref) / max(rms(ref), 1e-3)``; shapes must agree."""
  x = np.asarray(x, np.float64)
  if x.shape != ref.shape:
    raise ValueError(f"shapes differ: got {x.shape=}, {ref.shape=}.")
  return _rms(x - ref) / max(_rms(ref), 1e-3)


def _rms(x: np.ndarray) -> float:
  return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
