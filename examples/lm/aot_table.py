"""Puts what `examples.lm.aot_report` kept into configs/README.md.

python -m examples.lm.aot_table
"""

import json
import pathlib
from typing import Any

from examples.benchmarks import readme

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_KINDS = {
  "transformer": "Transformer++",
  "swla_grm": "SWLA, GRM",
  "titans": "Titans",
  "titans_grm": "Titans, GRM",
  "titans_ssc": "Titans, SSC",
}
_GIB = 2**30


def records(path: pathlib.Path) -> list[dict[str, Any]]:
  """The newest one of every config and topology, in the order of the table."""
  newest = {}
  for line in path.read_text().splitlines():
    record = json.loads(line)
    newest[_place(record)] = record
  return [newest[place] for place in sorted(newest)]


def _place(record) -> tuple:
  kind, size = record["config"].rsplit("_", 1)
  chip = record["topology"]
  return size != "760m", chip, list(_KINDS).index(kind)


def table(found: list[dict[str, Any]]) -> str:
  """A row per config and topology, sizes in GiB a chip."""
  rows = [
    "| config | chips | parameters, optimiser | temporaries | total, of | "
    "interconnect | step | MFU | of Transformer++ |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
  ]
  gib = lambda record, name: f"{record[name] / _GIB:.2f}"
  for record in found:
    base = _find(found, record, "transformer")
    ratio = "" if base is None else f"{_ratio(record, base):.2f}"
    step = f"{record['step_seconds']:.3f} s"
    cells = [
      f"`{record['config']}`",
      record["topology"],
      f"{gib(record, 'parameters')}, {gib(record, 'moments')}",
      gib(record, "temporaries"),
      f"{gib(record, 'total')}, {record['hbm'] // _GIB}",
      gib(record, "interconnect"),
      step + (" *" if record["kernels"] else ""),
      f"{record['mfu']:.0%}",
      ratio,
    ]
    rows.append(f"| {' | '.join(cells)} |")
  return "\n".join(rows)


def bars(found: list[dict[str, Any]]) -> str:
  """What was to be reached, and what was."""
  lines = []
  for record in found:
    for kind, other, limit in (
      ("titans_grm", "transformer", 2.5),
      ("titans_ssc", "titans", 1.3),
    ):
      base = _find(found, record, other)
      if base is None or record["config"].rsplit("_", 1)[0] != kind:
        continue
      ratio = _ratio(record, base)
      verdict = "met" if ratio <= limit else "missed"
      lines.append(
        f"* {_KINDS[kind]} takes at most {limit} times the step of "
        f"{_KINDS[other]} ({record['config'].rsplit('_', 1)[1]}, "
        f"{record['topology']}): {ratio:.2f}, {verdict}."
      )
  fits = sum(record["total"] <= record["hbm"] for record in found)
  lines.append(f"* All fit: {fits} of {len(found)}.")
  return "\n".join(lines)


def _find(found, record, kind) -> dict[str, Any] | None:
  """The record of another model, at the same size and on the same chips."""
  size = record["config"].rsplit("_", 1)[1]
  for other in found:
    same = other["topology"] == record["topology"]
    if same and other["config"] == f"{kind}_{size}":
      return other
  return None


def _ratio(record, base) -> float:
  return record["step_seconds"] / base["step_seconds"]


def main() -> None:
  """Writes the table."""
  found = records(_CONFIGS / "aot.jsonl")
  text = f"{table(found)}\n\n{bars(found)}"
  readme.replace("aot", text, _CONFIGS / "README.md")


if __name__ == "__main__":
  main()
