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
  arguments = parse(argv, __doc__)
  records = [machine.describe()]
  pythons = find_pythons(arguments)
  if pythons["memory-caching"] is not None:
    records += _agreement(pythons["memory-caching"])
  wanted = cases.layer_cases(tuple(arguments.lengths))
  records += run_all(wanted, pythons, arguments.jobs)
  write("layer", records, markdown(records), arguments)


def markdown(records: list[dict]) -> str:
  """All tables of a run."""
  parts = [
    machine.sentence(records[0]),
    report.bars_table(report.bars(records), "GRM, segment 64"),
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


def parse(
  argv: list[str] | None,
  description: str | None,
  lengths: tuple[int, ...] = LENGTHS,
) -> argparse.Namespace:
  """The arguments of a run."""
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
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
  parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
  parser.add_argument(
    "--jobs", type=int, default=2, help="cases at a time, a core each"
  )
  parser.add_argument("--out", type=Path, help="where JSON lines go")
  parser.add_argument(
    "--readme", action="store_true", help="put the tables into the README"
  )
  return parser.parse_args(argv)


def write(
  name: str, records: list[dict], text: str, arguments: argparse.Namespace
) -> None:
  """Prints the tables of a run, and keeps them where that was asked for."""
  if arguments.out is not None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    arguments.out.write_text(lines)
  print(text)
  if arguments.readme:
    readme.replace(name, text)


def find_pythons(arguments: argparse.Namespace) -> dict[str, str | None]:
  """The interpreter for each package; None for one that is not here."""
  pythons: dict[str, str | None] = {
    "memcache_jax": sys.executable,
    "memory-caching": str(arguments.rival_python),
    "titans-pytorch": str(arguments.rival_python),
    "jax-linear-attention": str(arguments.jax_rival_python),
  }
  for package, python in pythons.items():
    if python is not None and not Path(python).exists():
      print(f"{package} is left out: there is no {python}", file=sys.stderr)
      pythons[package] = None
  return pythons


def _agreement(rival_python: str) -> list[dict]:
  module = "examples.benchmarks.agreement"
  return _run([sys.executable, "-m", module, f"--rival-python={rival_python}"])


def run_all(
  wanted: list[cases.Case], pythons: dict[str, str | None], jobs: int
) -> list[dict]:
  """Records of all cases that can be run here, in their order."""
  wanted = [case for case in wanted if pythons[case.package] is not None]
  cores = queue.SimpleQueue()
  for core in range(jobs):
    cores.put(core)

  def run(case):
    core = cores.get()
    try:
      worker = [pythons[case.package], "-m", cases.WORKERS[case.package]]
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
