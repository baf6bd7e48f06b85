"""Compiles the training step for a pod that is not here: what will it take?

python -m examples.lm.aot_report --config=configs/lm/titans_grm_760m.py \
  --topology=v5e:16x16

It needs the package libtpu and no TPU. Compiling takes minutes.
"""

import os
import sys
import time

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
    The compiled step, its shardings, and the number of chips.
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
  with jax.set_mesh(mesh):
    return step.lower(state, batch).compile(), layout, len(devices)


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


def rows(settings: Settings, topology: str) -> dict[str, str]:
  """The lines of the report."""
  start = time.perf_counter()
  compiled, layout, chips = compile_step(settings, topology)
  seconds = time.perf_counter() - start
  state = sharding.abstract_state(settings)
  params = bytes_per_chip(state.params, layout.state.params)
  moments = bytes_per_chip(state.opt_state, layout.state.opt_state)
  memory = compiled.memory_analysis()
  total = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )
  gib, teraflops, clock = _CHIPS[topology.split(":")[0]]
  costs = hlo_costs.costs(compiled.as_text())
  step_time = costs.cycles / clock * 1e-6
  tokens = settings.batch_size * settings.length
  weights = sum(x.size for x in jax.tree.leaves(state.params))
  flops = 6 * weights * tokens
  lines = {
    "mesh": ", ".join(f"{a} {n}" for a, n in layout.mesh.shape.items()),
    "tokens per step": f"{tokens:,}",
    "parameters": f"{weights:,}; {params / _GIB:.3f} GiB a chip",
    "moments": f"{moments / _GIB:.3f} GiB a chip",
    "temporaries": f"{memory.temp_size_in_bytes / _GIB:.2f} GiB a chip",
    "total": f"{total / _GIB:.2f} of {gib} GiB a chip",
    "model flops per step": f"{flops:.3e} (6 x weights x tokens)",
    "collectives": f"{costs.collective_bytes / _GIB:.2f} GiB a chip and step",
    "compiler's cycles": f"{costs.cycles:,} a step",
    "compile time": f"{seconds:.0f} s",
  }
  if costs.cycles:
    used = flops / (chips * teraflops * 1e12 * step_time)
    lines["estimated step"] = f"{step_time:.3f} s, waits left out"
    lines["model-flops utilisation"] = f"{used:.1%}, waits left out"
  return lines


def main(arguments: list[str]) -> None:
  """Prints the report."""
  del arguments
  jax.config.update("jax_platforms", "cpu")
  topology = flags.FLAGS.topology
  if topology.split(":")[0] not in _CHIPS:
    sys.exit(f"error: --topology must be of {', '.join(_CHIPS)}: {topology}")
  try:
    settings = Settings.from_config(flags.FLAGS.config)
    lines = rows(settings, topology)
  except InputError as error:
    sys.exit(f"error: {error}")
  table = Table(box=None, show_header=False)
  for name, value in lines.items():
    table.add_row(name, value)
  Console(highlight=False).print(table)


if __name__ == "__main__":
  # Here, as flags are one table for all that is imported into a process.
  config_flags.DEFINE_config_file("config", None, "See main.")
  flags.DEFINE_string("topology", "v5e:16x16", "Chips and layout.")
  flags.mark_flags_as_required(["config"])
  app.run(main)
