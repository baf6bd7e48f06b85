"""`python -m examples.recall.main --config=configs/mqar/NAME.py`."""

import dataclasses
import json
import pathlib
import time

import numpy as np
from absl import app, flags
from ml_collections import config_flags

from examples.recall import training
from examples.recall.settings import Settings

_CONFIG = config_flags.DEFINE_config_file(
  "config", default=None, help_string="a file of configs/mqar", lock_config=True
)
_OUT = flags.DEFINE_string("out", None, "write the results to this JSON file")


def main(arguments: list[str]) -> None:
  """Trains and measures every seed of the config."""
  if len(arguments) > 1:
    raise app.UsageError(f"unknown arguments: {' '.join(arguments[1:])}")
  fields = dict(_CONFIG.value)
  seeds = fields.pop("seeds")
  try:
    settings = Settings(**fields)
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  results = run(settings, seeds)
  if _OUT.value:
    text = json.dumps(results, indent=1) + "\n"
    pathlib.Path(_OUT.value).write_text(text)


def run(settings: Settings, seeds: tuple[int, ...]) -> dict:
  """Trains and measures every seed, prints and returns what came out."""
  runs = []
  for seed in seeds:
    start = time.perf_counter()

    def report(step: int, loss: float, seed: int = seed) -> None:
      print(f"seed {seed}, step {step:>6,}: loss {loss:.3f}", flush=True)

    params = training.train(settings, seed, report)
    accuracy = training.accuracy(settings, params)
    seconds = time.perf_counter() - start
    print(f"seed {seed}: accuracy {accuracy:.3f} after {seconds:.0f} s")
    runs.append({"seed": seed, "accuracy": accuracy, "seconds": seconds})
  accuracies = np.array([run["accuracy"] for run in runs])
  print(
    f"{settings.memory} with {settings.aggregate}: accuracy "
    f"{accuracies.mean():.3f}, from {accuracies.min():.3f} to "
    f"{accuracies.max():.3f} over {len(runs)} seeds"
  )
  return {"settings": dataclasses.asdict(settings), "runs": runs}


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  app.run(main)
