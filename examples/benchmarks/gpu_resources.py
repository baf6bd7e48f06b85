"""What the kernels for GPUs take of one, as its compiler says.

python -m examples.benchmarks.gpu_resources --readme

No GPU is needed, only XLA's compiler for one and NVIDIA's assembler, which
belong in an environment of their own (Linux, x86-64)::

  pip install "jax-cuda13-plugin==JAX" "jax-cuda13-pjrt==JAX" nvidia-cuda-nvcc

with the version of jax for JAX. Registers and spilled bytes are those of one
thread, as `ptxas` counts them; shared memory is that of a program, as XLA
launches it. None of it says how fast a kernel is, or whether it is right.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from examples.benchmarks import readme
from examples.benchmarks.gpu_calls import OPS, Case, call_of

README = Path(__file__).parents[2] / "pallas_kernels" / "README.md"
ARCHITECTURE = "sm_90a"
# What XLA wants to know of the GPU that it compiles for.
H100 = """
device_description_str: "H100"
platform_name: "CUDA"
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 84978434048
  memory_bandwidth: 3352320000000
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


SIZES = [
  *((width, "bfloat16") for width in (64, 96, 128, 256)),
  (128, "float32"),
]


def compile_for_h100(case: Case):
  """The program of a call, with all gradients that are kernels."""
  device = topologies.get_topology_desc(
    platform="cuda",
    topology_name="h100",
    target_config=H100,
    topology="1x1x1",
  ).devices[0]
  sharding = SingleDeviceSharding(device)
  of_op, arrays = call_of(case)
  arrays = jax.tree.map(lambda x: x.update(sharding=sharding), arrays)
  run = lambda arrays: of_op(**arrays, implementation="triton")

  def loss(arrays):
    outputs = jax.tree.leaves(run(arrays))
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in outputs)

  program = jax.grad(loss) if case.differentiated else run
  return jax.jit(program).lower(arrays).compile()


def assembler() -> str:
  """The path of `ptxas`."""
  found = shutil.which("ptxas")
  package = importlib.util.find_spec("nvidia")
  for folder in package.submodule_search_locations if package else []:
    found = found or next(map(str, Path(folder).glob("*/bin/ptxas")), None)
  if found is None:
    raise FileNotFoundError("No ptxas: pip install nvidia-cuda-nvcc.")
  return found


def assemble(ptx: Path) -> str:
  """What the assembler says about a file."""
  command = [assembler(), "-v", f"-arch={ARCHITECTURE}", "-o", os.devnull]
  return subprocess.run(
    [*command, str(ptx)], capture_output=True, text=True, check=True
  ).stderr


def registers(said: str) -> dict[str, tuple[int, int]]:
  """Registers and spilled bytes of each kernel, as the assembler says."""
  return {
    name: (int(used), int(spilled))
    for name, spilled, used in re.findall(
      r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) reg",
      said,
      re.DOTALL,
    )
  }


def launches(sequence: str) -> dict[str, tuple[int, int]]:
  """Threads and bytes of shared memory of each kernel of a program."""
  return {
    name: (int(threads), int(shared))
    for name, threads, shared in re.findall(
      r" (\w+) grid: .*threads: \[(\d+).*shared_memory: (\d+)", sequence
    )
  }


def measure(width: int, dtype: str, dump: Path) -> dict[str, str]:
  """A column of the table: what each kernel takes."""
  worst = {}
  for op in OPS:
    for path in dump.glob("*"):
      path.unlink()
    try:
      compile_for_h100(Case(op, width, dtype))
    except NotImplementedError:  # of such a width
      continue
    [sequence] = dump.glob("*thunk_sequence.txt")
    launched, prefix = launches(sequence.read_text()), f"memcache_{op}_"
    for ptx in dump.glob("*.ptx"):
      if prefix not in ptx.read_text():
        continue
      for name, (used, spilled) in registers(assemble(ptx)).items():
        threads, shared = launched[name]
        # Calls of one kernel are told apart by a number behind its name.
        kernel = re.sub(r"__\d+$", "", name.removeprefix(prefix))
        key = f"`{op}`: `{kernel}`"
        found = (spilled, used, shared, threads)
        worst[key] = max(found, worst.get(key, found))
  return {
    key: f"{threads} x {used}, {spilled}, {shared / 1024:.0f}"
    for key, (spilled, used, shared, threads) in worst.items()
  }


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--readme", action="store_true", help="put it there")
  options = parser.parse_args(argv)
  dump = Path(tempfile.mkdtemp(prefix="gpu_resources_"))
  # Before anything is compiled.
  os.environ |= {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": f"--xla_dump_to={dump}",
  }
  jax.config.update("jax_platforms", "cpu")
  columns = {
    f"{width} {dtype}": measure(width, dtype, dump) for width, dtype in SIZES
  }
  kernels = sorted(set().union(*columns.values()))
  lines = [["kernel", *columns], ["---"] * (1 + len(columns))]
  lines += [
    [kernel, *(column.get(kernel, "") for column in columns.values())]
    for kernel in kernels
  ]
  table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  print(table)
  if options.readme:
    readme.replace("resources", table, README)


if __name__ == "__main__":
  main()
