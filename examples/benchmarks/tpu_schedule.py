"""What the kernels cost on a TPU, read off the compiler's own schedule.

python -m examples.benchmarks.tpu_schedule --readme

No TPU is needed, only its compiler: ``pip install libtpu`` (Linux, x86-64).
It is told to write down the final instruction bundles of every kernel. A
bundle takes a cycle; those of a loop count as often as the loop runs. Waiting
for memory is not in them. The XLA form of the same call is a sum of the
estimates that the compiler attaches to its fusions. The bound is the time that
the matrix units need for the products of the algorithm, each counted in full,
though half of what one token reads of its own segment is masked.
"""

import argparse
import collections
import math
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from examples.benchmarks import readme

README = Path(__file__).parents[2] / "pallas_kernels" / "README.md"

# Of v5e: four units of 128 x 128 multiply-adds each cycle; 1.5 GHz.
TOPOLOGY = "v5e:2x2"
FLOPS_PER_CYCLE = 4 * 128 * 128 * 2
CYCLES_PER_SECOND = 1.5e9
BYTES_PER_CYCLE = 819e9 / CYCLES_PER_SECOND


@dataclass(frozen=True)
class Case:
  """One call: 8 heads, bfloat16."""

  width: int
  backward: bool = False
  decays: bool = False
  tokens: int = 4096
  length: int = 256
  heads: int = 8

  @property
  def kernel(self) -> str:
    return (
      f"memcache_cached_linear_attention_{'bwd' if self.backward else 'fwd'}"
    )

  @property
  def name(self) -> str:
    kind = "decay, checkpoint" if self.decays else "no decay, independent"
    return f"{'backward' if self.backward else 'forward'}, {kind}"

  @property
  def segments(self) -> int:
    return self.tokens // self.length

  @property
  def flops(self) -> float:
    """Of all products: within segments, of states, and reads of these."""
    c, d, g = self.length, self.width, self.segments
    inside, state = 2 * c * c * d, 2 * c * d * d
    if self.backward:
      segment = 5 * inside + 2 * state + 2 * state * (g - 1) / 2
    else:
      segment = 2 * inside + state + state * (g - 1) / 2
    return self.heads * g * segment


CASES = [
  Case(width, backward, decays)
  for backward in (False, True)
  for decays in (False, True)
  for width in (128, 256)
]


def arguments(case: Case) -> tuple:
  """Prepared operands as the kernels take them, and as the op does.

  Backwards, the latter follow the gradients of its outputs.
  """
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGY
  )
  sharding = SingleDeviceSharding(topology.devices[0])
  t, n, d, g = case.tokens, case.heads, case.width, case.segments
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding
  )
  kernel = [array(1, n, t, d, dtype=jnp.bfloat16)] * 3
  kernel += [array(1, n, g, t), array(1, n, 6 if case.decays else 1, t)]
  if case.backward:
    states = array(1, g, n, d, d)
    kernel += [states, kernel[0], states]
  op = [array(1, t, n, d, dtype=jnp.bfloat16)] * 3
  op += [array(1, t, n, g), array(1, t, n)]
  op += [array(1, t, n)] * (2 if case.decays else 0)
  if case.backward:
    op.insert(0, (op[2], states))
  return kernel, op


def kernel_function(case: Case, config):
  """The kernel alone, of prepared arrays."""
  import importlib

  package = "memcache_jax.pallas_kernels.linear_attention"
  forward = importlib.import_module(f"{package}.mosaic_tpu")
  backward = importlib.import_module(f"{package}.mosaic_tpu_vjp")
  options = dict(segment_length=case.length, chained=case.decays, config=config)

  def run(*arrays):
    operands = forward.Operands(*arrays[:5])
    if case.backward:
      return backward.bwd(operands, *arrays[5:], **options)
    return forward.fwd(operands, **options)

  return run


def xla_function(case: Case, chunk_size: int):
  """The XLA form of the op."""
  from memcache_jax.ops import cached_linear_attention

  def run(q, k, v, weights, own_weight, *decays):
    log_decay, write = decays if decays else (None, None)
    return cached_linear_attention(
      *(q, k, v, weights, own_weight),
      log_decay=log_decay,
      write=write,
      segment_length=case.length,
      write_mode="checkpoint" if case.decays else "independent",
      chunk_size=chunk_size,
      implementation="xla",
    )

  return run


def xla_estimate(case: Case) -> tuple[float, int]:
  """Cycles and temporary bytes of the XLA form, of the better chunks.

  As the kernel takes the states of the forward pass, the cycles of gradients
  are what they add to a forward call; the bytes are of both together.
  """
  import jax

  def compiled(function, *arrays):
    form = jax.jit(function).lower(*arrays).compile()
    temporaries = form.memory_analysis().temp_size_in_bytes
    return xla_cycles(form.as_text()), temporaries

  def estimate(chunk_size):
    run = xla_function(case, chunk_size)

    def with_gradients(gradients, *arrays):
      outputs, pull = jax.vjp(run, *arrays)
      return outputs, pull(gradients)

    if not case.backward:
      return compiled(run, *arrays)
    forward, _ = compiled(run, *arrays[1:])
    both, temporaries = compiled(with_gradients, *arrays)
    return both - forward, temporaries

  _, arrays = arguments(case)
  return min(estimate(chunk_size) for chunk_size in (128, 256))


def without_dump(function, *args):
  """Runs it in a process whose compiler writes nothing down.

  Of gradients in XLA, writing takes minutes, where compiling takes seconds.
  """
  spawn = multiprocessing.get_context("spawn")
  with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
    return process.submit(_without_dump, function, *args).result()


def _without_dump(function, *args):
  os.environ.pop("LIBTPU_INIT_ARGS", None)  # before the compiler is loaded
  return function(*args)


def bundles(dump: Path, kernel: str) -> Iterator[tuple[int, bool, bool]]:
  """Of the newest kernel of that name.

  Loop depth, whether it spills, and whether it is the first of a loop.
  """
  files = [
    path
    for path in dump.glob(f"*{kernel}*final_bundles.txt")
    if "schedule-analysis" not in path.name
  ]
  if not files:
    raise FileNotFoundError(f"No bundles of {kernel!r} among {dump}.")
  newest = max(files, key=lambda x: x.stat().st_mtime)
  for line in newest.read_text().splitlines():
    bundle = re.match(r"\s*0x[0-9a-f]+\s*([A-Z]*)\s*:\s*((?:>\s*)*)", line)
    if bundle:
      yield bundle[2].count(">"), "_spill]" in line, bundle[1] == "LB"


def count_bundles(dump: Path, kernel: str) -> tuple[collections.Counter, int]:
  """Bundles of the newest kernel of that name by loop depth, and spilling."""
  depths, spilling = collections.Counter(), 0
  for depth, spills, _ in bundles(dump, kernel):
    depths[depth] += 1
    spilling += spills
  return depths, spilling


def kernel_cycles(depths, case: Case, config) -> float:
  """Every depth times how often its loops run: steps, then earlier blocks."""
  blocks = case.segments // config.segments_per_block
  unroll = 2 if case.backward else 4
  steps = case.heads * blocks
  loop = config.segments_per_block // math.gcd(
    config.segments_per_block, unroll
  )
  inner = steps * (blocks - 1) / 2 * loop
  return depths[0] + depths[1] * steps + depths[2] * inner


def xla_cycles(text: str) -> float:
  """Sum of the compiler's estimates over a program, loops as they run."""
  computations, name, entry = collections.defaultdict(list), None, None
  for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
    if head and not line.startswith(" "):
      name = head[2]
      entry = name if head[1] else entry
    elif name:
      computations[name].append(line)

  def cycles(name):
    total = 0.0
    for line in computations[name]:
      estimate = re.search(r'"estimated_cycles":"?(\d+)', line)
      total += int(estimate[1]) if estimate else 0
      loop = re.search(
        r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line
      )
      if loop:
        total += trips(loop[1]) * cycles(loop[2])
    return total

  def trips(condition):
    """The bound that the counter of the loop is compared with."""
    constants = re.findall(
      r"s32\[\]\S* constant\((\d+)\)", "\n".join(computations[condition])
    )
    if len(constants) != 1:
      raise ValueError(f"No one bound in {computations[condition]}.")
    return int(constants[0])

  return cycles(entry)


def measure(case: Case, dump: Path) -> dict:
  """One row of the table."""
  import importlib

  import jax

  pieces = importlib.import_module(
    "memcache_jax.pallas_kernels.linear_attention.config"
  )
  config = pieces.config(
    pieces.Call(
      *(case.width, case.width, "bfloat16"),
      *(case.length, case.segments),
      carried=0,
    )
  )
  kernel, _ = arguments(case)
  compiled = jax.jit(kernel_function(case, config)).lower(*kernel).compile()
  memory = compiled.memory_analysis()
  depths, spilling = count_bundles(dump, case.kernel)
  cycles = kernel_cycles(depths, case, config)
  estimate, temporaries = without_dump(xla_estimate, case)
  traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
  return {
    "width": case.width,
    "call": case.name,
    "bundles by depth": "/".join(str(depths[i]) for i in range(3)),
    "spilling": spilling,
    "cycles": round(cycles),
    "of the bound": f"{case.flops / FLOPS_PER_CYCLE / cycles:.0%}",
    "ms": f"{cycles / CYCLES_PER_SECOND * 1e3:.2f}",
    "memory cycles": round(traffic / BYTES_PER_CYCLE),
    "temporaries": memory.temp_size_in_bytes,
    "XLA cycles": round(estimate),
    "XLA / kernel": f"{estimate / cycles:.1f}x",
    "XLA temporaries": f"{temporaries / 2**20:.0f} MiB",
  }


def parts() -> dict[str, tuple]:
  """Of the README: cases, and what measures one."""
  # Import this module under its own name, for what reads it.
  from examples.benchmarks import tpu_schedule_batches as batches
  from examples.benchmarks import tpu_schedule_delta as delta
  from examples.benchmarks import tpu_schedule_reads as reads

  return {
    "schedule": (CASES, measure),
    "schedule-reads": (reads.CASES, reads.measure),
    "schedule-delta": (delta.CASES, delta.measure),
    "schedule-batches": (batches.CASES, batches.measure),
  }


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--readme", action="store_true", help="put it there")
  parser.add_argument("--first", type=int, help="cases")
  parser.add_argument("--only", nargs="*", help="tables, as in the README")
  options = parser.parse_args(argv)
  # What is written down for all tables takes gigabytes.
  with tempfile.TemporaryDirectory(prefix="tpu_schedule_") as dump:
    # Before jax is imported, which happens in the functions above.
    os.environ |= {
      "JAX_PLATFORMS": "cpu",
      "TPU_SKIP_MDS_QUERY": "1",
      "TPU_ACCELERATOR_TYPE": "v5litepod-4",
      "TPU_WORKER_HOSTNAMES": "localhost",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "LIBTPU_INIT_ARGS": (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
      ),
    }
    tables = parts()
    for part in options.only or tables:
      cases, of = tables[part]
      rows = []
      for case in cases[: options.first]:
        rows.append(of(case, Path(dump)))
        print(rows[-1], flush=True)
      if options.readme:
        readme.replace(part, table(rows), README)


def table(rows: list[dict]) -> str:
  header = list(rows[0])
  lines = [header, ["---"] * len(header)]
  lines += [[str(row.get(name, "")) for name in header] for row in rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
  main()
