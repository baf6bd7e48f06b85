"""`python -m examples.recall.main --config=configs/TASK/NAME.py`."""

import json
import pathlib
import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags
from flax import nnx
from ml_collections import config_flags

from examples.recall import sweep, training
from examples.recall.settings import Settings, parse, plain

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  default=None,
  help_string="a file of configs/mqar or configs/needle",
  lock_config=True,
)
_OUT = flags.DEFINE_string("out", None, "write the results to this JSON file")
_GATES = flags.DEFINE_string(
  "gates", None, "draw what the first test row reads into this PNG file"
)
_SWEEP = flags.DEFINE_enum(
  "sweep", None, list(sweep.SWEEPS), "run a comparison around the config"
)
_FOLDER = flags.DEFINE_string(
  "folder", None, "of a sweep; what it already holds is not run again"
)


def main(arguments: list[str]) -> None:
  """Trains and measures every seed of the config, or of a sweep around it."""
  if len(arguments) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(arguments[1:])}")
  fields = _CONFIG.value.to_dict()
  seeds = fields.pop("seeds")
  if not seeds:
    raise app.UsageError("`seeds` must name one at least: got none")
  try:
    settings = parse(fields)
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  if (_SWEEP.value is None) != (_FOLDER.value is None):
    raise app.UsageError("--sweep and --folder belong together")
  if _SWEEP.value is not None:
    if _OUT.value is not None or _GATES.value is not None:
      raise app.UsageError(
        "--out and --gates are of one config: a sweep has its --folder"
      )
    try:
      runs = sweep.runs(_SWEEP.value, settings, seeds)
    except ValueError as error:
      raise app.UsageError(str(error)) from error
    run_sweep(runs, settings, pathlib.Path(_FOLDER.value))
    return
  if _GATES.value is not None and settings.aggregate == "none":
    raise app.UsageError("--gates wants an aggregate: it is 'none'")
  out, gates = _file(_OUT, ".json"), _file(_GATES, ".png")
  results, params = run(settings, seeds)
  if out is not None:
    out.write_text(json.dumps(results, indent=1) + "\n")
  if gates is not None:
    from examples.recall import report  # matplotlib is needed here only

    report.draw_gates(training.gates(settings, params), gates)


def _file(flag: flags.FlagHolder, suffix: str) -> pathlib.Path | None:
  """Where a flag says to write, checked before anything is trained."""
  if flag.value is None:
    return None
  path = pathlib.Path(flag.value)
  if path.suffix != suffix or not path.parent.is_dir():
    raise app.UsageError(
      f"--{flag.name} must be a {suffix} file in a folder that exists: got "
      f"{path}"
    )
  return path


def run(settings: Settings, seeds: tuple[int, ...]) -> tuple[dict, nnx.State]:
  """Trains and measures every seed; prints what came out.

  Returns:
    The results, and the weights of the last seed.
  """
  runs = []
  for seed in seeds:
    result, params = _run_seed(settings, seed)
    runs.append(result | {"seed": seed})
  for length in settings.task.tests:
    values = np.array([run["accuracy"][length] for run in runs])
    print(
      f"{settings.memory} with {settings.aggregate}: accuracy "
      f"{values.mean():.3f} in {length:,} tokens, from {values.min():.3f} to "
      f"{values.max():.3f} over {len(runs)} seeds"
    )
  return {"settings": plain(settings), "runs": runs}, params


def run_sweep(
  runs: Sequence[sweep.Run], base: Settings, folder: pathlib.Path
) -> None:
  """Runs what is missing of a sweep, and writes its table and its figure."""
  from examples.recall import report  # as above

  results = sweep.load(folder)
  missing = [run for run in runs if sweep.find(results, run) is None]
  print(f"{len(runs)} runs, {len(missing)} of them left, in {folder}")
  try:
    for done, run in enumerate(missing):
      print(f"{done + 1} of {len(missing)}: {run.name}, seed {run.seed}")
      sweep.append(folder, run, _run_seed(run.settings, run.seed)[0])
      report.write(folder, runs, sweep.load(folder), base)
  except KeyboardInterrupt:
    print(f"stopped: what is done is in {folder}, and is not run again")
    sys.exit(130)
  print(report.write(folder, runs, sweep.load(folder), base))


def _run_seed(settings: Settings, seed: int) -> tuple[dict, nnx.State]:
  start = time.perf_counter()

  def report(step: int, loss: float) -> None:
    print(f"seed {seed}, step {step:>6,}: loss {loss:.3f}", flush=True)

  params = training.train(settings, seed, report)
  accuracy = training.accuracy(settings, params)
  seconds = time.perf_counter() - start
  shown = ", ".join(f"{x:.3f} in {n:,}" for n, x in accuracy.items())
  print(f"seed {seed}: accuracy {shown} tokens after {seconds:.0f} s")
  return {"accuracy": accuracy, "seconds": seconds}, params


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  app.run(main)
