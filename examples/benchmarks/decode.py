"""What one more token costs, against the length of the text before it.

  python -m examples.benchmarks.decode

One full layer, one row, one compiled step whose state is donated. A layer whose
step, or whose reading of a text in pieces, differs from its definition ends
the run before any time is taken, and so does a state that holds anything but
one memory per segment. Every layer has a process of its own, on one core.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from examples.benchmarks import decode_report, layer, machine, measure
from examples.benchmarks.machine import ROOT

CONTEXTS = (1024, 2048, 4096, 8192, 16384)
# Kinds of memory, and how cached ones are read; "none" is without a cache.
CASES = (
  *(("linear", aggregate) for aggregate in ("none", "grm", "soup", "ssc")),
  *(("dla", aggregate) for aggregate in ("none", "grm", "soup", "ssc")),
  ("attention", "none"),
)
LIMITS = measure.Limits(calls=64, seconds=3.0, least=8)
# A round is a segment at most, some 50 ms where a step is fast: what else the
# machine did then is not what the step costs.
ROUNDS = 9


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
  parser.add_argument("--core", type=int, default=0, help="the core to stay on")
  parser.add_argument("--out", type=Path, help="where JSON lines go")
  parser.add_argument(
    "--readme", action="store_true", help="put the table into the README"
  )
  parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
  arguments = parser.parse_args(argv)
  if arguments.worker is not None:
    measure.use_one_core(arguments.core)
    run(*arguments.worker, tuple(arguments.contexts), LIMITS)
    return
  records = [machine.describe()]
  for case in CASES:
    records += _run_worker(case, arguments)
    print(records[-1], file=sys.stderr)
  layer.write("decode", records, decode_report.markdown(records), arguments)


def run(
  memory: str, aggregate: str, contexts: tuple[int, ...], limits: measure.Limits
) -> None:
  """Checks, then times; raises WrongResultError and times nothing if wrong."""
  # Only now: XLA reads the flags of `use_one_core` when it is loaded.
  import jax

  from examples.benchmarks import check, decode_layers

  layer = decode_layers.build(memory, aggregate)
  definition = decode_layers.build(memory, aggregate, "reference")
  errors = decode_layers.errors(layer, definition)
  check.require_right(errors)
  x = jax.random.normal(jax.random.key(3), (1, 1, decode_layers.DIM))
  for context in contexts:
    state = decode_layers.after(layer, context)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    step = jax.jit(layer.apply, donate_argnums=2)
    step = step.lower(layer.params, x, state).compile()
    del state
    stream = {}

    def token(step=step, stream=stream):
      y, stream["state"] = step(layer.params, x, stream["state"])
      jax.block_until_ready((y, stream["state"]))

    rounds = []
    for _ in range(ROUNDS):
      stream.clear()  # one state at a time
      stream["state"] = decode_layers.after(layer, context)
      token()
      rounds.append(measure.repeat(token, limits))
    rounds.sort(key=lambda round_: round_["cpu_ms"])
    record = {
      "memory": memory,
      "aggregate": aggregate,
      "context": context,
      "state_mib": size / 2**20,
      "check": max(errors.values()),
    }
    measure.print_record(record | rounds[ROUNDS // 2])


def _run_worker(case: tuple[str, str], arguments) -> list[dict]:
  command = [sys.executable, "-m", "examples.benchmarks.decode"]
  command += ["--worker", *case, f"--core={arguments.core}", "--contexts"]
  command += map(str, arguments.contexts)
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if result.returncode:
    raise SystemExit(f"{case}\n{result.stderr}")
  return [json.loads(line) for line in result.stdout.splitlines()]


if __name__ == "__main__":
  main()
