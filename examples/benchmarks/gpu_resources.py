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
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from examples.benchmarks import readme

README = Path(__file__).parents[2] / "pallas_kernels" / "README.md"
OPS = (
  *("cached_linear_attention", "cache_read", "selected_read", "delta_rule"),
  "read_networks",
)
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


@dataclass(frozen=True)
class Case:
  """One call: 8 heads, checkpoint mode, everything decays.

  Attributes:
    width: of keys and values.
    dtype: of these.
    length: tokens of a segment, for each of which there is a state to read.
    tokens: of the call.
    carried: memories carried into it; with any, what a document starts with.
  """

  width: int
  dtype: str = "bfloat16"
  length: int = 256
  tokens: int = 4096
  carried: int = 0

  @property
  def name(self) -> str:
    return f"{self.width} {self.dtype}"


CASES = [Case(64), Case(96), Case(128), Case(256), Case(128, "float32")]


def compile_for_h100(case: Case, op: str = OPS[0]):
  """The program of a call, with all gradients."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies

  device = topologies.get_topology_desc(
    platform="cuda",
    topology_name="h100",
    target_config=H100,
    topology="1x1x1",
  ).devices[0]
  sharding = jax.sharding.SingleDeviceSharding(device)
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding
  )
  of_op, arrays = _CALLS[op](case, array)
  run = lambda arrays: of_op(**arrays, implementation="triton")

  def loss(arrays):
    outputs = jax.tree.leaves(run(arrays))
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in outputs)

  return jax.jit(jax.grad(loss)).lower(arrays).compile()


def _cached_linear_attention(case: Case, array):
  from memcache_jax.ops import cached_linear_attention

  t, d, carried = case.tokens, case.width, case.carried
  arrays = {name: array(1, t, 8, d, dtype=case.dtype) for name in "qkv"}
  arrays["weights"] = array(1, t, 8, carried - (-t // case.length))
  for name in ("own_weight", "log_decay", "write"):
    arrays[name] = array(1, t, 8)
  if carried:
    arrays["memories"] = array(1, carried, 8, d, d)
    arrays["state"] = array(1, 8, d, d)
  options = dict(segment_length=case.length, write_mode="checkpoint")
  return functools.partial(cached_linear_attention, **options), arrays


def _cache_read(case: Case, array):
  from memcache_jax.ops import cache_read

  t, d, states = (
    case.tokens,
    case.width,
    case.carried - (-case.tokens // case.length),
  )
  return cache_read, {
    "q": array(1, t, 8, d, dtype=case.dtype),
    "states": array(1, states, 8, d, d),
    "weights": array(1, t, 8, states),
  }


def _selected_read(case: Case, array):
  """Of two each."""
  import jax.numpy as jnp

  from memcache_jax.ops.cache_read import selected_read

  _, arrays = _cache_read(case, array)
  arrays["weights"] = array(1, case.tokens, 8, 2)

  def run(weights, **arrays):
    index, xla = weights.astype(jnp.int32), lambda *_: None  # does not run
    return selected_read(weights=weights, index=index, xla=xla, **arrays)

  return run, arrays


def _read_networks(case: Case, array):
  """MLPs of the library; of a width that a norm cannot have without it."""
  import jax

  from memcache_jax.ops.mlp_memory import MLP, read_networks

  d, _, arrays = case.width, *_cache_read(case, array)
  network = MLP(norm=not d & (d - 1))
  slots = arrays.pop("states").shape[1]
  arrays["memories"] = {
    "w_in": array(1, slots, 8, d, 4 * d),
    "w_out": array(1, slots, 8, 4 * d, d),
  }
  static = jax.eval_shape(lambda: network.static_params(8, d))
  arrays["params"] = {name: array(*x.shape) for name, x in static.items()}
  return functools.partial(read_networks, network), arrays


def _delta_rule(case: Case, array):
  import jax.numpy as jnp

  from memcache_jax.ops import delta_rule

  t, d = case.tokens, case.width
  arrays = {name: array(1, t, 8, d, dtype=case.dtype) for name in "qkv"}
  arrays |= {name: array(1, t, 8) for name in ("beta", "log_decay")}
  if not case.carried:
    return delta_rule, arrays
  arrays |= {"state": array(1, 8, d, d), "initial": array(8, d, d)}
  starts = lambda beta: jnp.isnan(beta[..., 0])

  def run(beta, **arrays):
    return delta_rule(beta=beta, starts=starts(beta), **arrays)

  return run, arrays


_CALLS = {
  "cached_linear_attention": _cached_linear_attention,
  "cache_read": _cache_read,
  "selected_read": _selected_read,
  "delta_rule": _delta_rule,
  "read_networks": _read_networks,
}


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


def measure(case: Case, dump: Path) -> dict[str, str]:
  """A column of the table: what each kernel takes."""
  worst = {}
  for op in OPS:
    for path in dump.glob("*"):
      path.unlink()
    compile_for_h100(case, op)
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
  # Before jax is imported, which happens in the functions above.
  os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": f"--xla_dump_to={dump}",
  }
  columns = {case.name: measure(case, dump) for case in CASES}
  kernels = sorted(set().union(*columns.values()))
  lines = [["kernel", *columns], ["---"] * (1 + len(columns))]
  lines += [
    [kernel, *(column[kernel] for column in columns.values())]
    for kernel in kernels
  ]
  table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  print(table)
  if options.readme:
    readme.replace("resources", table, README)


if __name__ == "__main__":
  main()
