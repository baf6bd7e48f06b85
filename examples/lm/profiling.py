"""A trace of a few steps, for TensorBoard or Perfetto."""

import pathlib
from typing import Any

import jax

FOLDER = "profile"


class Profile:
  """Traces steps of a session, from its second on: the first one compiles.

  Args:
    workdir: of the run; traces go to the folder `profile` there.
    steps: how many to trace; 0 for none.
  """

  def __init__(self, workdir: pathlib.Path, steps: int):
    self._folder = workdir / FOLDER
    self._steps = steps
    self._tracing = False

  def before(self, step: int, state: Any) -> None:
    """Starts or stops at the beginning of a step of the session, from 1."""
    if self._steps and step == 2:
      jax.block_until_ready(state)
      jax.profiler.start_trace(self._folder)
      self._tracing = True
    elif self._tracing and step == 2 + self._steps:
      jax.block_until_ready(state)
      self.close()

  def close(self) -> None:
    """Ends the trace of a session that was too short for it."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
