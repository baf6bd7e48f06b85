"""A sweep as a table and as a figure."""

import pathlib
from collections.abc import Iterable

import matplotlib

matplotlib.use("agg")  # writes files, needs no screen

import matplotlib.pyplot as plt
import numpy as np

from examples.recall import sweep

TABLE, FIGURE = "table.md", "accuracy.png"


def accuracies(
  runs: Iterable[sweep.Run], results: list[dict]
) -> dict[str, list[float]]:
  """Accuracies of all seeds by entry, those that are there."""
  found: dict[str, list[float]] = {}
  for run in runs:
    result = sweep.find(results, run)
    if result is not None:
      found.setdefault(run.name, []).append(result["accuracy"])
  return found


def table(by_name: dict[str, list[float]]) -> str:
  """One row per entry: mean, least and most over its seeds."""
  lines = [
    "| model | accuracy | least | most | seeds |",
    "| --- | --- | --- | --- | --- |",
  ]
  for name, values in by_name.items():
    numbers = (np.mean(values), min(values), max(values))
    cells = " | ".join(f"{x:.3f}" for x in numbers)
    lines.append(f"| {name} | {cells} | {len(values)} |")
  return "\n".join(lines)


def draw(by_name: dict[str, list[float]], path: pathlib.Path) -> None:
  """A bar per entry, a dot per seed."""
  names = list(by_name)
  height = 0.8 + 0.35 * len(names)
  figure, axes = plt.subplots(figsize=(7, height), layout="constrained")
  means = [np.mean(by_name[name]) for name in names]
  axes.barh(names, means, color="C0", alpha=0.4)
  for place, name in enumerate(names):
    values = by_name[name]
    axes.plot(values, [place] * len(values), ".", color="C0")
  axes.set(xlabel="accuracy", xlim=(0, 1))
  axes.invert_yaxis()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def write(
  folder: pathlib.Path, runs: Iterable[sweep.Run], results: list[dict]
) -> str:
  """Writes both; returns the table."""
  by_name = accuracies(runs, results)
  text = table(by_name)
  (folder / TABLE).write_text(text + "\n")
  draw(by_name, folder / FIGURE)
  return text
