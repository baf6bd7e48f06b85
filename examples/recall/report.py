"""A sweep as a table and as figures, and a model's gates as a map."""

import pathlib
from collections.abc import Callable, Sequence

import matplotlib

matplotlib.use("agg")  # writes files, needs no screen

import matplotlib.pyplot as plt
import numpy as np

from examples.recall import sweep
from examples.recall.settings import Settings

TABLE, FIGURE, CURVES = "table.md", "accuracy.png", "curves.png"

# What accuracy is drawn against, where a sweep has several of it: of the
# settings and the length of the test.
AXES: dict[str, Callable[[Settings, int], int]] = {
  "pairs": lambda settings, length: settings.task.facts,
  "length": lambda settings, length: length,
  "width": lambda settings, length: settings.dim,
}


def accuracies(
  runs: Sequence[sweep.Run], results: list[dict]
) -> dict[str, dict[int, list[float]]]:
  """Accuracies of all seeds by entry and length, those that are there."""
  found: dict[str, dict[int, list[float]]] = {}
  for run in runs:
    result = sweep.find(results, run)
    if result is not None:
      by_length = found.setdefault(run.name, {})
      for length, value in result["accuracy"].items():
        by_length.setdefault(length, []).append(value)
  return found


def table(by_name: dict[str, dict[int, list[float]]]) -> str:
  """One row per entry: the mean of its seeds and their range, by length."""
  lengths = sorted({length for x in by_name.values() for length in x})
  lines = [
    f"| model | seeds | {' | '.join(f'{length:,}' for length in lengths)} |",
    "| --- " * (2 + len(lengths)) + "|",
  ]
  for name, by_length in by_name.items():
    cells = [_cell(by_length.get(length)) for length in lengths]
    seeds = max(len(values) for values in by_length.values())
    lines.append(f"| {name} | {seeds} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _cell(values: list[float] | None) -> str:
  if values is None:
    return ""
  return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def draw(
  by_name: dict[str, dict[int, list[float]]], path: pathlib.Path
) -> None:
  """A bar per entry, a dot per seed, of the longest rows of each."""
  names = list(by_name)
  height = 0.8 + 0.35 * len(names)
  figure, axes = plt.subplots(figsize=(7, height), layout="constrained")
  longest = [by_length[max(by_length)] for by_length in by_name.values()]
  axes.barh(names, [np.mean(x) for x in longest], color="C0", alpha=0.4)
  for place, values in enumerate(longest):
    axes.plot(values, [place] * len(values), ".", color="C0")
  axes.set(xlabel="accuracy", xlim=(0, 1))
  axes.invert_yaxis()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def curves(
  runs: Sequence[sweep.Run], results: list[dict], base: Settings
) -> dict[str, dict[str, dict[int, list[float]]]]:
  """Accuracies by axis, model and place on the axis.

  An axis has the tests that are like the base's longest on the others, and is
  left out where all of them are in one place.
  """
  tests = [(run, length) for run in runs for length in run.settings.task.tests]
  longest = max(base.task.tests)
  found: dict[str, dict[str, dict[int, list[float]]]] = {}
  for axis, place in AXES.items():
    others = [AXES[name] for name in AXES if name != axis]
    same = lambda run, length, others=others: all(
      of(run.settings, length) == of(base, longest) for of in others
    )
    chosen = [test for test in tests if same(*test)]
    if len({place(run.settings, length) for run, length in chosen}) < 2:
      continue
    by_model = found.setdefault(axis, {})
    for run, length in chosen:
      result = sweep.find(results, run)
      if result is not None:
        by_place = by_model.setdefault(_model(run.settings), {})
        values = by_place.setdefault(place(run.settings, length), [])
        values.append(result["accuracy"][length])
  return found


def _model(settings: Settings) -> str:
  if settings.aggregate == "none":
    return settings.memory
  return f"{settings.memory}, {settings.aggregate}"


def draw_curves(
  found: dict[str, dict[str, dict[int, list[float]]]], path: pathlib.Path
) -> None:
  """A panel for each axis: a line for each model, from least to most."""
  figure, panels = plt.subplots(
    ncols=len(found),
    figsize=(1 + 3.5 * len(found), 4),
    sharey=True,
    squeeze=False,
    layout="constrained",
  )
  for panel, (axis, by_model) in zip(panels[0], found.items(), strict=True):
    for name, by_place in by_model.items():
      places = sorted(by_place)
      values = [by_place[place] for place in places]
      (line,) = panel.plot(
        places, [np.mean(x) for x in values], ".-", label=name
      )
      panel.fill_between(
        places,
        [min(x) for x in values],
        [max(x) for x in values],
        color=line.get_color(),
        alpha=0.15,
      )
    panel.set(xlabel=axis, ylim=(0, 1.02))
    panel.set_xscale("log", base=2)
    every = sorted({place for x in by_model.values() for place in x})
    panel.set_xticks(every, [str(place) for place in every])
  panels[0, 0].set_ylabel("accuracy")
  panels[0, -1].legend(fontsize="small")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def draw_gates(gates: dict[int, np.ndarray], path: pathlib.Path) -> None:
  """A map for each layer and head: tokens against what they read.

  Logarithmic segments have a row for each block that was written, which ends
  where a later one takes it over.

  Args:
    gates: by layer, [t n s_and_online], the online memory last.
    path: the file to write.
  """
  heads = max(x.shape[1] for x in gates.values())
  figure, panels = plt.subplots(
    len(gates),
    heads,
    figsize=(1 + 3 * heads, 1 + 2.5 * len(gates)),
    squeeze=False,
    layout="constrained",
  )
  for row, (layer, of_layer) in zip(panels, gates.items(), strict=True):
    for head, panel in enumerate(row):
      image = panel.imshow(
        of_layer[:, head].T,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        vmin=0,
        vmax=max(1.0, float(of_layer.max())),
      )
      last = of_layer.shape[-1] - 1
      panel.set_yticks([0, last], ["first segment", "online"])
      panel.set(title=f"layer {layer}, head {head}", xlabel="token")
  figure.colorbar(image, ax=panels, label="gate")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def write(
  folder: pathlib.Path,
  runs: Sequence[sweep.Run],
  results: list[dict],
  base: Settings,
) -> str:
  """Writes the table and what figures there are; returns the table."""
  by_name = accuracies(runs, results)
  text = table(by_name)
  (folder / TABLE).write_text(text + "\n")
  draw(by_name, folder / FIGURE)
  if found := curves(runs, results, base):
    draw_curves(found, folder / CURVES)
  return text
