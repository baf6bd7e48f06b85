"""Compile time of a training step's gradient against sequence length.

  python -m examples.benchmarks.compile_time

It must not grow with the length: nothing is unrolled over tokens, chunks or
segments. Each length is compiled in a process of its own, a few times with the
caches of jax cleared; CPU times count, and the least of them. The program is
the gradient of the training loss of a small language model with memory-cached
layers.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from examples.benchmarks import machine, measure, readme
from examples.benchmarks.machine import ROOT

LENGTHS = (256, 1024, 4096, 16384)
SEGMENT = 64
TIME_LIMIT = 1.5  # last over first, compile time
SIZE_LIMIT = 1.3  # last over first, bytes of the program before compilation


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
  parser.add_argument("--aggregate", default="grm", help="or residual, ssc")
  parser.add_argument("--repeats", type=int, default=2)
  parser.add_argument("--out", type=Path, help="where JSON lines go")
  parser.add_argument(
    "--readme", action="store_true", help="put the table into the README"
  )
  parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
  arguments = parser.parse_args(argv)
  if arguments.worker is not None:
    measure.use_one_core(None)
    record = compile_length(
      arguments.worker, arguments.aggregate, arguments.repeats
    )
    measure.print_record(record)
    return
  records = [machine.describe()]
  for tokens in arguments.lengths:
    records.append(_run_worker(tokens, arguments))
    print(records[-1], file=sys.stderr)
  if arguments.out is not None:
    arguments.out.write_text("".join(f"{json.dumps(r)}\n" for r in records))
  print(markdown(records))
  if arguments.readme:
    readme.replace("compile_time", markdown(records))


def compile_length(tokens: int, aggregate: str, repeats: int) -> dict:
  """Traces and compiles the gradient of the loss for one length."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from examples.benchmarks import layers
  from memcache_jax.caching import Cached, Constant
  from memcache_jax.memories import Linear
  from memcache_jax.models import (
    LanguageModel,
    MemorySpec,
    ModelConfig,
    next_token_loss,
  )

  memory = Cached(Linear(), Constant(SEGMENT), layers.aggregator(aggregate))
  config = ModelConfig(
    vocab_size=256,
    dim=128,
    num_layers=2,
    pattern=(MemorySpec(memory, num_heads=4),),
  )
  graph, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))

  def loss(params, tokens):
    logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
    return next_token_loss(logits, tokens[:, 1:])

  ids = jax.ShapeDtypeStruct((1, tokens + 1), jnp.int32)
  trace_s, compile_s, text = [], [], ""
  for _ in range(repeats):
    jax.clear_caches()
    start = time.process_time()
    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, ids)
    trace_s.append(time.process_time() - start)
    start = time.process_time()
    lowered.compile()
    compile_s.append(time.process_time() - start)
    text = lowered.as_text()
  return {
    "record": "compile_time",
    "aggregate": aggregate,
    "tokens": tokens,
    "trace_s": min(trace_s),
    "compile_s": min(compile_s),
    "program_bytes": len(text),
    "repeats": repeats,
  }


def markdown(records: list[dict]) -> str:
  """The table, and the bars as met or missed."""
  rows = records[1:]
  lines = [
    machine.sentence(records[0]),
    "",
    "| tokens | trace s | compile s | program kB |",
    "|---|---|---|---|",
  ]
  lines += [
    f"| {row['tokens']} | {row['trace_s']:.2f} | {row['compile_s']:.2f} "
    f"| {row['program_bytes'] / 1e3:.0f} |"
    for row in rows
  ]
  compile_s = rows[-1]["compile_s"] / rows[0]["compile_s"]
  size = rows[-1]["program_bytes"] / rows[0]["program_bytes"]
  lines += [
    "",
    f"Last over first: compile time {compile_s:.2f}x, bar below "
    f"{TIME_LIMIT}x: {'met' if compile_s < TIME_LIMIT else 'missed'}; "
    f"program {size:.2f}x, bar at most {SIZE_LIMIT}x: "
    f"{'met' if size <= SIZE_LIMIT else 'missed'}.",
  ]
  return "\n".join(lines)


def _run_worker(tokens: int, arguments) -> dict:
  command = [sys.executable, "-m", "examples.benchmarks.compile_time"]
  command += [f"--worker={tokens}", f"--aggregate={arguments.aggregate}"]
  command += [f"--repeats={arguments.repeats}"]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if result.returncode:
    raise SystemExit(result.stderr)
  return json.loads(result.stdout)


if __name__ == "__main__":
  main()
