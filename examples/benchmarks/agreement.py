"""Compares our bare layer with memory-caching's on the same weights.

  python -m examples.benchmarks.agreement --rival-python PYTHON

Two implementations that share no code: ours by segment in JAX, theirs by
token in PyTorch. They pool keys by their sum, so ours does too. Outputs and
the gradients of all weights are compared; the largest relative rms error of
each case is printed as JSON, and one above the limit ends in an error.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from examples.benchmarks import cases, measure, rivals

TOKENS = 256
SEGMENT = 48  # the last segment is not complete


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  default = rivals.interpreter(rivals.TORCH)
  parser.add_argument("--rival-python", type=Path, default=default)
  parser.add_argument("--core", type=int, help="the core to stay on")
  arguments = parser.parse_args(argv)
  measure.use_one_core(arguments.core)
  from examples.benchmarks import check

  errors = {}
  for case in _cases():
    dumped = _run_theirs(case, arguments.rival_python)
    value, gradient = compare(case, dumped)
    record = {"record": "agreement", "aggregate": case.aggregate}
    record |= {"write_mode": case.write_mode, "tokens": TOKENS}
    record |= {"segment": SEGMENT, "value": value, "gradient": gradient}
    measure.print_record(record)
    errors[f"{case.aggregate} {case.write_mode}"] = max(value, gradient)
  check.require_right(errors)


def _cases() -> list[cases.Case]:
  return [
    cases.Case(
      "memory-caching",
      aggregate=aggregate,
      segment=SEGMENT,
      write_mode=write_mode,
      tokens=TOKENS,
    )
    for aggregate in ("residual", "grm", "ssc")
    for write_mode in ("independent", "checkpoint")
  ]


def _run_theirs(case: cases.Case, python: Path) -> dict:
  """x, y, weights q ... o and their gradients dq ... do."""
  import numpy as np

  worker = cases.WORKERS[case.package]
  with tempfile.TemporaryDirectory() as folder:
    path = str(Path(folder) / "dump.npz")
    command = [str(python), "-m", worker, *case.arguments(), "--dump", path]
    subprocess.run(command, cwd=rivals.ROOT, check=True)
    with np.load(path) as arrays:
      return dict(arrays)


def compare(case: cases.Case, theirs: dict) -> tuple[float, float]:
  """Relative errors of our outputs and gradients against theirs."""
  import jax

  from examples.benchmarks import check, layers
  from memcache_jax.caching import Cached, Constant
  from memcache_jax.memories import Linear

  memory = Cached(
    Linear(),
    Constant(case.segment),
    layers.aggregator(case.aggregate, pooling="sum"),
    case.write_mode,
  )
  # Without a router theirs keeps a projection that has no gradient.
  names = "qkvuo" if "u" in memory.gates() else "qkvo"
  layer = layers.bare(memory, {name: theirs[name] for name in names})

  @jax.jit
  def ours(params, x):
    def loss(params):
      y = layer.apply(params, x, None)[0]
      return layers.loss(y), y

    return jax.grad(loss, has_aux=True)(params)

  gradient, y = ours(layer.params, theirs["x"])
  wanted = {name: theirs[f"d{name}"] for name in names}
  return (
    check.worst_error(y, theirs["y"]),
    check.worst_error(gradient, wanted),
  )


if __name__ == "__main__":
  main()
