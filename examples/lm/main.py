"""Trains, measures and resumes a language model.

python -m examples.lm.main --config=configs/lm/NAME.py --workdir=DIR
"""

import contextlib
import pathlib
import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags
from rich.console import Console

from examples.interrupt import Interrupt
from examples.lm import train
from examples.lm.settings import Settings
from examples.workdir import InputError

OK, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file of configs/lm; --config.steps=7 changes a value."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where the run lives; every process sees the same folder."
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed", False, "One of several processes, as on a pod."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of process 0, where nothing else says it."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "How many there are.")
_PROCESS = flags.DEFINE_integer("process", None, "The number of this one.")


def main(arguments: list[str]) -> None:
  """Runs, and exits with a code that says how it went."""
  if len(arguments) > 1:
    raise app.UsageError(f"unexpected arguments: {arguments[1:]}")
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # orbax tells much
  if _DISTRIBUTED.value:
    jax.distributed.initialize(
      _COORDINATOR.value, _PROCESSES.value, _PROCESS.value
    )
  sys.exit(_run())


def _run() -> int:
  try:
    settings = Settings.from_config(_CONFIG.value)
    console = Console(highlight=False)
    # Processes cannot tell one another that one was asked to stop.
    alone = jax.process_count() == 1
    with Interrupt() if alone else contextlib.nullcontext() as interrupt:
      result = train.run(
        settings, pathlib.Path(_WORKDIR.value), console, interrupt
      )
    if result.step < settings.steps:
      console.print(f"interrupted: step {result.step:,} is saved")
      return INTERRUPTED
    return OK
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_INPUT
  except train.TrainingError as error:
    print(f"error: {error}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(main)
