"""Throughput against context length: Figure 4 of the paper, for this machine.

  python -m examples.benchmarks.throughput --out=runs/throughput.jsonl

Training, as tokens a second through the gradient of the loss, and decoding, as
milliseconds for a token after so many, of Transformer++ (with JAX's own
attention), memories, and caches over them. Every model is compared with its
definition before any time of it is taken, and runs in a process of its own, on
one core. A run that is interrupted goes on where it was. What would take more
memory or time than the limits is left out, and the tables say so.
"""

import argparse
import json
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.benchmarks import machine, measure, readme
from examples.benchmarks.machine import ROOT

LENGTHS = (1024, 4096, 16384, 32768)
MODES = ("train", "decode")
FIGURE = Path(__file__).with_name("throughput.png")


def main(argv: list[str] | None = None) -> None:
  arguments = parse(argv)
  if arguments.worker is not None:
    measure.use_one_core(arguments.core)
    from examples.benchmarks import throughput_worker

    throughput_worker.run(
      arguments.worker,
      arguments.lengths,
      throughput_worker.Most(arguments.seconds, arguments.gib),
    )
    return
  records = load(arguments.out)
  run(arguments, records)
  print(markdown(records))
  figures = [arguments.figure, FIGURE if arguments.readme else None]
  for path in filter(None, figures):
    from examples.benchmarks import throughput_figure

    throughput_figure.draw(records, path)
  if arguments.readme:
    picture = f"![Both against the length of the context.]({FIGURE.name})"
    readme.replace("throughput", f"{markdown(records)}\n\n{picture}")


def parse(argv: list[str] | None) -> argparse.Namespace:
  """The arguments of a run."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--out", type=Path, help="JSON lines; what they hold is not run again")
  add("--lengths", type=int, nargs="+", default=LENGTHS)
  add("--models", nargs="+", help="all of them unless given")
  add("--seconds", type=float, default=60.0, help="for one step, at most")
  add("--gib", type=float, default=4.0, help="of memory for a step, at most")
  add("--jobs", type=int, default=2, help="models at a time, a core each")
  add("--figure", type=Path, help="where the figure goes (extra `plots`)")
  add("--readme", action="store_true", help="put tables and figure there")
  add("--worker", help=argparse.SUPPRESS)
  add("--core", type=int, help=argparse.SUPPRESS)
  return parser.parse_args(argv)


def load(path: Path | None) -> list[dict]:
  """The records so far, of which the first describes this machine.

  Raises:
    SystemExit: if they were made with other code, or elsewhere.
  """
  here = machine.describe()
  if path is None:
    return [here]
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(here) + "\n")
    return [here]
  text = path.read_text()
  if not text.endswith("\n"):  # what a crash cut off
    text = text[: text.rfind("\n") + 1]
    path.write_text(text)
  records = [json.loads(line) for line in text.splitlines()]
  for name in ("commit", "cpu", "versions"):
    if not records or records[0].get(name) != here[name]:
      raise SystemExit(f"{path} is of another {name}: choose another --out.")
  return records


def run(arguments: argparse.Namespace, records: list[dict]) -> None:
  """Adds what is missing to the records and to their file."""
  missing = {
    name: lengths
    for name in arguments.models or models()
    if (lengths := _missing(name, arguments.lengths, records))
  }
  cores = queue.SimpleQueue()
  for core in range(arguments.jobs):
    cores.put(core)

  def work(name):
    core = cores.get()
    try:
      for record in _worker(name, missing[name], core, arguments):
        records.append(record)
        if arguments.out is not None:
          with arguments.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, file=sys.stderr)
    except BaseException:
      # Here, since what awaits the result may learn of it after this thread has
      # taken the next model.
      pool.shutdown(wait=False, cancel_futures=True)
      raise
    finally:
      cores.put(core)

  with ThreadPoolExecutor(arguments.jobs) as pool:
    futures = [pool.submit(work, name) for name in missing]
    try:
      for future in futures:
        future.result()
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise


def models() -> tuple[str, ...]:
  """The names of all models."""
  from examples.benchmarks.models import NAMES

  return NAMES


def _missing(name, lengths, records) -> list[int]:
  done = {(r.get("model"), r.get("tokens"), r.get("mode")) for r in records}
  return [
    tokens
    for tokens in sorted(lengths)
    if not all((name, tokens, mode) in done for mode in MODES)
  ]


def _worker(name, lengths, core, arguments):
  """The records of a model, as they come; ends the run if it fails."""
  command = [sys.executable, "-m", "examples.benchmarks.throughput"]
  command += [f"--worker={name}", f"--core={core}", "--lengths"]
  command += map(str, lengths)
  command += [f"--seconds={arguments.seconds}", f"--gib={arguments.gib}"]
  with subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True
  ) as process:
    for line in process.stdout:
      yield json.loads(line)
  if process.returncode:
    raise SystemExit(f"{name} failed, see above.")


def markdown(records: list[dict]) -> str:
  """Both tables of a run."""
  return "\n\n".join(
    [
      machine.sentence(records[0]),
      "Training, thousand tokens a second:",
      _table(records, "train", speed),
      "Decoding, milliseconds a token:",
      _table(records, "decode", lambda r: r["cpu_ms"]),
    ]
  )


def by_case(records: list[dict], mode: str) -> dict[tuple[str, int], dict]:
  """Records of a mode by model and length, the last of each."""
  return {
    (record["model"], record["tokens"]): record
    for record in records
    if record.get("mode") == mode
  }


def speed(record: dict) -> float:
  """Thousand tokens a second."""
  return record["tokens"] / record["cpu_ms"]


def _table(records, mode, value) -> str:
  found = by_case(records, mode)
  lengths = sorted({tokens for _, tokens in found})
  names = list(dict.fromkeys(name for name, _ in sorted(found, key=_order)))
  lines = [
    f"| model | {' | '.join(f'{tokens:,}' for tokens in lengths)} |",
    f"| --- |{' --- |' * len(lengths)}",
  ]
  for name in names:
    cells = []
    for tokens in lengths:
      record = found.get((name, tokens))
      if record is None:
        cells.append("")
      elif "left_out" in record:
        cells.append(f"({record['left_out']})")
      else:
        cells.append(f"{value(record):.3g}")
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _order(key) -> int:
  return models().index(key[0])


if __name__ == "__main__":
  main()
