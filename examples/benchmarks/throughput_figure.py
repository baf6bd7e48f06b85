"""The records of `throughput` as a figure."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")  # writes files, needs no screen

import matplotlib.pyplot as plt

from examples.benchmarks import throughput
from examples.benchmarks.models import NAMES

PANELS = {
  "train": ("training, tokens a second", lambda r: 1e3 * throughput.speed(r)),
  "decode": ("decoding, ms a token", lambda r: r["cpu_ms"]),
}


def draw(records: list[dict], path: Path) -> None:
  """Training and decoding against length, a line per model.

  Args:
    records: of a run.
    path: of a PNG.
  """
  figure, panels = plt.subplots(
    1, len(PANELS), figsize=(11, 4.5), layout="constrained"
  )
  for panel, (mode, (label, value)) in zip(panels, PANELS.items(), strict=True):
    found = throughput.by_case(records, mode)
    for number, name in enumerate(NAMES):
      timed = [
        (tokens, value(record))
        for (model, tokens), record in sorted(found.items())
        if model == name and "cpu_ms" in record
      ]
      if timed:
        style = "o--" if "," in name else "o-"
        x, y = zip(*timed, strict=True)
        panel.plot(x, y, style, color=f"C{number}", label=name)
    panel.set(xlabel="context, tokens", ylabel=label)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.grid(alpha=0.3)
  panels[0].legend(fontsize="small")
  figure.savefig(path, dpi=120)
  plt.close(figure)
