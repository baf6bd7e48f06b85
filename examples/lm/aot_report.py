"""Compiles the training step for a pod that is not here: what will it take?

python -m examples.lm.aot_report --config=configs/lm/titans_grm_760m.py \
  --topology=v5e:16x16

It needs the package libtpu and no TPU. Compiling takes minutes. Of kernels the
compiler has no estimates: --config.model.implementation=xla does without them.
With --out=configs/aot.jsonl the report is kept; `examples.lm.aot_table` makes
the table in configs/README.md of all that were.
"""

import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
from absl import app, flags
from jax.experimental import topologies
from ml_collections import config_flags
from rich.console import Console
from rich.table import Table

from examples.lm import hlo_costs, sharding, training
from examples.lm.settings import Settings
from examples.workdir import InputError

# What libtpu wants to know where there is no TPU.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# GiB of memory, bf16 TFLOP/s and cycles per microsecond of a chip.
_CHIPS = {
  "v5e": (16, 197, 1500),
  "v5p": (95, 459, 1750),
  "v6e": (32, 918, 1750),
}
_GIB = 2**30


def compile_step(settings: Settings, topology: str):
  """The training step of a config, compiled for chips that are not here.

  Returns:
    The compiled step, its text, its shardings, and the number of chips.
  """
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  devices = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  ).devices
  mesh = sharding.make_mesh(settings.mesh, devices)
  layout = sharding.layout(settings, mesh)
  step, _ = training.compiled(settings, layout)
  state = sharding.on_mesh(sharding.abstract_state(settings), layout.state)
  batch = sharding.abstract_batch(settings)
  batch = sharding.on_mesh(batch, jax.tree.map(lambda _: layout.batch, batch))
  with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
    # The compiler writes the text: what it does on v5p, `as_text` cannot read.
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    compiled = step.lower(state, batch).compile(options)
    (text,) = pathlib.Path(folder).glob("*.after_codegen.txt")
    return compiled, text.read_text(), layout, len(devices)


def bytes_per_chip(tree, shardings) -> int:
  """Of arrays spread so, on each of their devices."""
  sizes = jax.tree.map(
    lambda x, s: x.dtype.itemsize * _size(s.shard_shape(x.shape)),
    tree,
    shardings,
  )
  return sum(jax.tree.leaves(sizes))


def _size(shape: tuple[int, ...]) -> int:
  size = 1
  for length in shape:
    size *= length
  return size


def measure(settings: Settings, topology: str) -> dict[str, Any]:
  """What one step takes, of each chip; sizes in bytes."""
  start = time.perf_counter()
  compiled, text, layout, chips = compile_step(settings, topology)
  seconds = time.perf_counter() - start
  state = sharding.abstract_state(settings)
  memory = compiled.memory_analysis()
  hbm, teraflops, clock = _CHIPS[topology.split(":")[0]]
  costs = hlo_costs.costs(text)
  step_time = costs.cycles / clock * 1e-6
  tokens = settings.batch_size * settings.length
  weights = sum(x.size for x in jax.tree.leaves(state.params))
  flops = 6 * weights * tokens
  peak = chips * teraflops * 1e12 * step_time
  return {
    "topology": topology,
    "chips": chips,
    "mesh": {axis: n for axis, n in layout.mesh.shape.items() if n > 1},
    "tokens": tokens,
    "weights": weights,
    "parameters": bytes_per_chip(state.params, layout.state.params),
    "moments": bytes_per_chip(state.opt_state, layout.state.opt_state),
    "temporaries": memory.temp_size_in_bytes,
    "total": memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes,
    "hbm": hbm * _GIB,
    "model_flops": flops,
    "interconnect": costs.collective_bytes,
    "kernels": costs.kernels,
    "cycles": costs.cycles,
    "step_seconds": step_time,
    "mfu": flops / peak if peak else None,
    "compile_seconds": round(seconds),
    "jax": jax.__version__,
  }


def lines(record: dict[str, Any]) -> dict[str, str]:
  """What is printed of a record."""
  gib = lambda name: f"{record[name] / _GIB:.2f} GiB"
  found = {
    "mesh": ", ".join(f"{axis} {n}" for axis, n in record["mesh"].items()),
    "tokens per step": f"{record['tokens']:,}",
    "weights": f"{record['weights']:,}",
    "parameters": f"{gib('parameters')} a chip",
    "optimiser": f"{gib('moments')} a chip",
    "temporaries": f"{gib('temporaries')} a chip",
    "total": f"{gib('total')} of {gib('hbm')} a chip",
    "model flops": f"{record['model_flops']:.3e} (6 x weights x tokens)",
    "interconnect": f"{gib('interconnect')} a chip, results of collectives",
    "compile time": f"{record['compile_seconds']} s",
  }
  if record["cycles"]:
    found |= {
      "compiler's cycles": f"{record['cycles']:,}",
      "estimated step": f"{record['step_seconds']:.3f} s, waits left out",
      "model-flops utilisation": f"{record['mfu']:.1%}, waits left out",
    }
  if record["kernels"]:
    found["kernels"] = f"{record['kernels']:,} runs, not in the cycles"
  return found


def main(arguments: list[str]) -> None:
  """Prints the report, and keeps it where asked to."""
  del arguments
  jax.config.update("jax_platforms", "cpu")
  topology = flags.FLAGS.topology
  if topology.split(":")[0] not in _CHIPS:
    sys.exit(f"error: --topology must be of {', '.join(_CHIPS)}: {topology}")
  try:
    record = measure(Settings.from_config(flags.FLAGS.config), topology)
  except InputError as error:
    sys.exit(f"error: {error}")
  table = Table(box=None, show_header=False)
  for name, value in lines(record).items():
    table.add_row(name, value)
  Console(highlight=False).print(table)
  if flags.FLAGS.out:
    path = config_flags.get_config_filename(flags.FLAGS["config"])
    record = {"config": pathlib.Path(path).stem, **record}
    with open(flags.FLAGS.out, "a") as file:
      file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
  # Here, as flags are one table for all that is imported into a process.
  config_flags.DEFINE_config_file("config", None, "See main.")
  flags.DEFINE_string("topology", "v5e:16x16", "Chips and layout.")
  flags.DEFINE_string("out", None, "JSON lines to add the report to.")
  flags.mark_flags_as_required(["config"])
  app.run(main)
