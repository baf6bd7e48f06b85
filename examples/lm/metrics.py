"""Numbers of a run: one JSON object a line, TensorBoard, and a table."""

import json
import pathlib

import jax
import tensorboardX
from rich.table import Table

from examples.train_state import TrainState

FILE = "metrics.jsonl"


class Log:
  """Writes scalars by step, in the first process only.

  Args:
    workdir: of the run; `metrics.jsonl` and the folder `tensorboard` there.
    step: the last step that counts. Lines of later ones, which a run wrote
      before it was stopped, are dropped.
  """

  def __init__(self, workdir: pathlib.Path, step: int):
    self._writes = jax.process_index() == 0
    if not self._writes:
      return
    path = workdir / FILE
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if _step(line) <= step]
    path.write_text("".join(line + "\n" for line in kept))
    self._file = path.open("a", buffering=1)
    self._board = tensorboardX.SummaryWriter(
      str(workdir / "tensorboard"), purge_step=step + 1
    )

  def write(self, step: int, scalars: dict[str, float]) -> None:
    """Writes the scalars of a step."""
    if not self._writes:
      return
    self._file.write(json.dumps({"step": step, **scalars}) + "\n")
    for name, value in scalars.items():
      self._board.add_scalar(name, value, step)

  def close(self) -> None:
    """Writes out what is left."""
    if self._writes:
      self._file.close()
      self._board.close()


def _step(line: str) -> float:
  """Of a line; infinity of one that was cut."""
  try:
    return json.loads(line)["step"]
  except ValueError:
    return float("inf")


def parameter_table(state: TrainState) -> Table:
  """Every parameter: its path, shape, place and size."""
  table = Table(title="parameters", box=None)
  for name, right in {
    "name": False,
    "shape": False,
    "over": False,
    "elements": True,
  }.items():
    table.add_column(
      name, justify="right" if right else "left", overflow="fold"
    )
  total = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
    total += leaf.size
    table.add_row(
      jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(
        ".value"
      ),
      " ".join(map(str, leaf.shape)),
      " ".join(str(axis or "-") for axis in leaf.sharding.spec),
      f"{leaf.size:,}",
    )
  table.add_row("all", "", "", f"{total:,}", style="bold")
  return table
