"""What a sweep runs, and the file that its results are kept in."""

import json
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from examples.recall.settings import Settings, plain
from examples.recall.tasks import Pairs

RESULTS = "results.jsonl"


class Run(NamedTuple):
  """One seed of one entry of a sweep."""

  name: str
  settings: Settings
  seed: int


def headline(base: Settings) -> dict[str, Settings]:
  """Does caching help the memory of the base, and how far is attention?"""
  cached = {
    f"{base.memory}, {name}": replace(base, aggregate=name)
    for name in ("residual", "gated_residual", "sparse", "logarithmic")
  }
  return {
    "attention": replace(base, memory="attention", aggregate="none"),
    base.memory: replace(base, aggregate="none"),
    **cached,
  }


def families(base: Settings) -> dict[str, Settings]:
  """Every memory, alone and with every way of reading cached ones."""
  entries = {"attention": replace(base, memory="attention", aggregate="none")}
  for memory in ("linear", "retnet", "swla", "dla", "titans", "gated_delta"):
    for aggregate in (
      "none",
      "residual",
      "gated_residual",
      "soup",
      "sparse",
      "logarithmic",
    ):
      name = memory if aggregate == "none" else f"{memory}, {aggregate}"
      entries[name] = replace(base, memory=memory, aggregate=aggregate)
  return entries


def ablations(base: Settings) -> dict[str, Settings]:
  """The paper's Table 5 (arXiv 2602.24281), and the row it left empty.

  Gates from the token alone, none, and u = q; a linear memory in place of a
  deep one; and segments that go on from one another, which the paper
  announces and does not print.
  """
  entries = {}
  for aggregate in ("gated_residual", "sparse"):
    full = replace(base, memory="titans", aggregate=aggregate)
    entries |= {
      f"titans, {aggregate}": full,
      f"titans, {aggregate}, gates from the input": replace(full, gate="input"),
      f"titans, {aggregate}, no gates": replace(full, gate="none"),
      f"titans, {aggregate}, u = q": replace(full, gate="shared"),
      f"titans, {aggregate}, checkpoint": replace(
        full, write_mode="checkpoint"
      ),
      f"linear, {aggregate}": replace(full, memory="linear"),
    }
  return entries


def sizes(base: Settings) -> dict[str, Settings]:
  """The headline's memories over numbers of pairs, lengths and widths.

  All have the vocabulary of the longest rows. Longer rows are a stage more.

  Raises:
    ValueError: for another task than `Pairs`.
  """
  if not isinstance(base.task, Pairs):
    raise ValueError(
      f"`task` must be 'mqar' for a sweep of sizes: got {base.task.name!r}."
    )
  *before, last = base.task.stages
  vocab_size = max(base.task.vocab_size, 4 * last.length + 2)
  task = replace(base.task, vocab_size=vocab_size)
  base = replace(base, task=task)
  entries = {}
  for name, entry in headline(base).items():
    for pairs in (max(1, last.num_pairs // 2), last.num_pairs):
      stages = (*before, last._replace(num_pairs=pairs))
      entries[f"{name}, {pairs} pairs"] = replace(
        entry, task=replace(task, stages=stages)
      )
    for factor in (2, 4):
      longer = last._replace(length=factor * last.length)
      entries[f"{name}, length {longer.length}"] = replace(
        entry, task=replace(task, stages=(*task.stages, longer))
      )
    for dim in (base.dim // 2, 2 * base.dim):
      entries[f"{name}, width {dim}"] = replace(entry, dim=dim)
  return entries


SWEEPS: dict[str, Callable[[Settings], dict[str, Settings]]] = {
  "headline": headline,
  "families": families,
  "ablations": ablations,
  "sizes": sizes,
}


def runs(sweep: str, base: Settings, seeds: tuple[int, ...]) -> list[Run]:
  """All runs of a sweep: every entry with its first seed first."""
  entries = SWEEPS[sweep](base)
  return [
    Run(name, settings, seed)
    for seed in seeds
    for name, settings in entries.items()
  ]


def load(folder: pathlib.Path) -> list[dict]:
  """The results so far; a line cut off by a crash is not one."""
  path = folder / RESULTS
  if not path.exists():
    return []
  lines = path.read_text().splitlines(keepends=True)
  results = [json.loads(line) for line in lines if line.endswith("\n")]
  for result in results:  # JSON has no numbers as keys
    by_length = result["accuracy"].items()
    result["accuracy"] = {int(length): value for length, value in by_length}
  return results


def find(results: list[dict], run: Run) -> dict | None:
  """The result of a run, by its settings and seed, whatever its name."""
  settings = _plain(run.settings)
  for result in results:
    if result["settings"] == settings and result["seed"] == run.seed:
      return result
  return None


def append(folder: pathlib.Path, run: Run, result: dict) -> None:
  """Adds a result to the file."""
  folder.mkdir(parents=True, exist_ok=True)
  record = {"settings": _plain(run.settings), "seed": run.seed, **result}
  path = folder / RESULTS
  text = path.read_text() if path.exists() else ""
  if text and not text.endswith("\n"):  # what a crash cut off
    text = text[: text.rfind("\n") + 1]
    path.write_text(text)
  with path.open("a") as file:
    file.write(json.dumps(record) + "\n")


def _plain(settings: Settings) -> dict:
  """As it comes back from a file."""
  return json.loads(json.dumps(plain(settings)))
