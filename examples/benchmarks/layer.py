"""Times the memory-caching layer next to other packages, in one run.

  python -m examples.benchmarks.rivals   # once: installs them
  python -m examples.benchmarks.layer

Every case runs in a process of its own, on one core. The environments that
`rivals` makes are used, or other interpreters that have the packages; without
them only our own layers are timed. A layer of ours that differs from its
definition ends the run before any time of it is taken.
"""

import argparse
import json
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from examples.benchmarks import cases, machine, readme, report, rivals
from examples.benchmarks.machine import ROOT

LENGTHS = (512, 1024, 2048)


def main(argv: list[str] | None = None) -> None:
  arguments = _parse(argv)
  records = [machine.describe()]
  pythons = _pythons(arguments)
  if pythons["memory-caching"] is not None:
    records += _agreement(pythons["memory-caching"])
  wanted = [
    case
    for case in cases.layer_cases(tuple(arguments.lengths))
    if pythons[case.library] is not None
  ]
  records += _run_all(wanted, pythons, arguments.jobs)
  text = "".join(json.dumps(record) + "\n" for record in records)
  if arguments.out is not None:
    arguments.out.write_text(text)
  print(markdown(records))
  if arguments.readme:
    readme.replace("layer", markdown(records))


def markdown(records: list[dict]) -> str:
  """All tables of a run."""
  parts = [
    machine.sentence(records[0]),
    report.bars_table(report.bars(records)),
    "The bare layer: projections around the memory, nothing else.",
    report.layer_table(records, "bare"),
    "The full layer, `MemoryMixer`:",
    report.layer_table(records, "mixer"),
  ]
  if any(r.get("record") == "agreement" for r in records):
    parts += [
      "Ours against memory-caching on its weights, relative rms difference:",
      report.agreement_table(records),
    ]
  return "\n\n".join(parts)


def _parse(argv):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--rival-python",
    type=Path,
    default=rivals.interpreter(rivals.TORCH),
    help="an interpreter that has memory-caching and titans-pytorch",
  )
  parser.add_argument(
    "--jax-rival-python",
    type=Path,
    default=rivals.interpreter(rivals.JAX),
    help="an interpreter that has jax-linear-attention",
  )
  parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
  parser.add_argument(
    "--jobs", type=int, default=2, help="cases at a time, a core each"
  )
  parser.add_argument("--out", type=Path, help="where JSON lines go")
  parser.add_argument(
    "--readme", action="store_true", help="put the tables into the README"
  )
  return parser.parse_args(argv)


def _pythons(arguments) -> dict[str, str | None]:
  """The interpreter for each library; None for one that is not here."""
  pythons: dict[str, str | None] = {
    "memcache_jax": sys.executable,
    "memory-caching": str(arguments.rival_python),
    "titans-pytorch": str(arguments.rival_python),
    "jax-linear-attention": str(arguments.jax_rival_python),
  }
  for library, python in pythons.items():
    if python is not None and not Path(python).exists():
      print(f"{library} is left out: there is no {python}", file=sys.stderr)
      pythons[library] = None
  return pythons


def _agreement(rival_python: str) -> list[dict]:
  module = "examples.benchmarks.agreement"
  return _run([sys.executable, "-m", module, f"--rival-python={rival_python}"])


def _run_all(wanted, pythons, jobs: int) -> list[dict]:
  """Records of all cases, in their order."""
  cores = queue.SimpleQueue()
  for core in range(jobs):
    cores.put(core)

  def run(case):
    core = cores.get()
    try:
      worker = [pythons[case.library], "-m", cases.WORKERS[case.library]]
      return _run([*worker, *case.arguments(), f"--core={core}"])
    finally:
      cores.put(core)

  with ThreadPoolExecutor(jobs) as pool:
    futures = {pool.submit(run, case): case for case in wanted}
    try:
      for done, future in enumerate(as_completed(futures), start=1):
        future.result()
        print(f"{done}/{len(wanted)} {futures[future]}", file=sys.stderr)
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise
  return [record for future in futures for record in future.result()]


def _run(command: list[str]) -> list[dict]:
  """The JSON lines that a process prints; ends everything if it fails."""
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if result.returncode:
    raise SystemExit(f"{' '.join(command)}\n{result.stderr}")
  return [json.loads(line) for line in result.stdout.splitlines()]


if __name__ == "__main__":
  main()
