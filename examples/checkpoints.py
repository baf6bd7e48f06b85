"""Everything a run needs to go on, in one orbax checkpoint per saved step."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

FOLDER = "checkpoints"
DAMAGED = "damaged"


class Checkpoints:
  """The saved steps of a run, newest last.

  A step counts only once it is complete: orbax writes it under another name
  and renames it at the end. What was left half-written is named and passed
  over. A step that is complete and cannot be read all the same is moved aside,
  never deleted. Several processes call every method together.

  Args:
    workdir: of the run; every process sees the same folder.
    say: prints a line.
    keep: how many steps to keep.
    background: whether to write while training goes on. An error then shows
      in the next `save`, in `check` or in `close`.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    say: Callable[[str], None] = print,
    *,
    keep: int = 2,
    background: bool = False,
  ):
    self._workdir = workdir.absolute()
    self._say = say
    self._options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=background
    )
    for step in self._half_written():
      self._say(f"checkpoint {step} was left half-written: passing it over")
    self._manager = self._open()
    self._newest = self._manager.latest_step()

  def _half_written(self) -> list[int]:
    folder = self._workdir / FOLDER
    names = [path.name for path in folder.glob("*")] if folder.exists() else []
    found = [re.match(r"(\d+)\..*tmp", name) for name in names]
    return sorted({int(match[1]) for match in found if match})

  def _open(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(self._workdir / FOLDER, options=self._options)

  def save(self, step: int, state: Any, notes: dict) -> None:
    """Saves a step unless it is the newest one already.

    Args:
      step: its number.
      state: a pytree of arrays.
      notes: what else to remember, as JSON can hold it; equal in all
        processes.

    Raises:
      Exception: when this or an earlier save failed.
    """
    if step == self._newest:
      return
    if self._manager.is_saving_in_progress():
      self._say(f"step {step} waits for checkpoint {self._newest} to be saved")
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes)
      ),
    )
    self._newest = step

  def restore(self, like: Any) -> tuple[Any, dict] | None:
    """Loads the newest step that can be read, or None.

    Args:
      like: a tree of arrays or of their shapes, dtypes and shardings, which
        need not be those the step was saved with.
    """
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    while (step := self._manager.latest_step()) is not None:
      restored, error = None, None
      try:
        restored = self._manager.restore(
          step,
          args=ocp.args.Composite(
            state=ocp.args.StandardRestore(like), notes=ocp.args.JsonRestore()
          ),
        )
      except Exception as caught:  # orbax raises what its many layers raise
        error = caught
      if _all_processes(error is None):
        self._newest = step
        return restored["state"], restored["notes"]
      self._put_aside(step, error)
    return None

  def _put_aside(self, step: int, error: Exception | None) -> None:
    old = self._workdir / FOLDER / str(step)
    new = self._workdir / DAMAGED / str(step)
    reason = str(error).splitlines()[0] if str(error) else repr(error)
    self._say(f"checkpoint {step} cannot be read, moved to {new}: {reason}")
    self._manager.close()
    if jax.process_index() == 0:
      new.parent.mkdir(exist_ok=True)
      old.rename(new)
    _all_processes(True)  # nobody looks before it is gone
    self._manager = self._open()
    self._newest = self._manager.latest_step()

  def check(self) -> None:
    """Raises what went wrong in the background."""
    self._manager.check_for_errors()

  def close(self) -> None:
    """Waits for what is being written, and raises what went wrong.

    Then threads of orbax may wait for each other for some five minutes, before
    which the process does not end.
    """
    try:
      self._manager.wait_until_finished()
    finally:
      self._manager.close()


def _all_processes(fine: bool) -> bool:
  """Whether it is so in every process."""
  if jax.process_count() == 1:
    return fine
  return bool(multihost_utils.process_allgather(np.array(fine)).all())
