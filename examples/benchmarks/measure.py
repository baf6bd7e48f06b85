"""Time and memory of a call; the standard library at import: rivals share it.

CPU time is what to compare: it does not count what other processes take.
"""

import ctypes
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_STATUS = Path("/proc/self/status")


class Limits(NamedTuple):
  """When to stop repeating: after `calls`, or `seconds` and `least` calls."""

  calls: int = 15
  seconds: float = 4.0
  least: int = 3


class First(NamedTuple):
  """What a first call gave: its result, its cost, what it kept in memory.

  Attributes:
    result: of the call.
    seconds: wall time.
    peak_mib: by how much resident memory rose during the call; None where the
      system does not say.
  """

  result: Any
  seconds: float
  peak_mib: float | None


def use_one_core(core: int | None) -> None:
  """One thread, kept on one core where the system can; before any import."""
  os.environ["OMP_NUM_THREADS"] = "1"
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
  )
  if core is not None and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {core})


def warm_up_jax() -> None:
  """Runs a small gradient: what jax loads at its first must not count."""
  import jax
  import jax.numpy as jnp

  def loss(x):
    return jnp.sum(jnp.tanh(x @ x))

  jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.ones((256, 256))))


def first(call: Callable[[], Any]) -> First:
  """Calls once, watching memory."""
  before = _forget_peak()
  start = time.perf_counter()
  result = call()
  seconds = time.perf_counter() - start
  peak = _status("VmHWM")
  grown = None if before is None or peak is None else peak - before
  return First(result, seconds, grown)


def repeat(call: Callable[[], Any], limits: Limits) -> dict[str, float]:
  """Times a call that ran before.

  Returns:
    Medians of CPU and wall time and the least CPU time in milliseconds, the
    number of calls, and the load of the machine.
  """
  wall, cpu = [], []
  begin = time.perf_counter()
  while len(wall) < limits.calls:
    late = time.perf_counter() - begin > limits.seconds
    if late and len(wall) >= limits.least:
      break
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    cpu.append((time.process_time() - cpu_start) * 1e3)
    wall.append((time.perf_counter() - start) * 1e3)
  return {
    "cpu_ms": statistics.median(cpu),
    "cpu_ms_least": min(cpu),
    "wall_ms": statistics.median(wall),
    "calls": len(wall),
    "load": os.getloadavg()[0],
  }


def time_rival(
  labels: dict,
  calls: dict[str, Callable[[], Any]],
  compile_s: dict[str, float] | None = None,
) -> None:
  """Times calls by mode, and prints a record of each.

  Args:
    labels: what the records say besides.
    calls: what to time.
    compile_s: seconds that each took to compile, where it was compiled.
  """
  for mode, call in calls.items():
    result = first(call)
    compiling = 0.0 if compile_s is None else compile_s[mode]
    record = {**labels, "mode": mode}
    record["first_call_s"] = compiling + result.seconds
    if mode == "forward_backward":
      # What comes after it finds memory that was never given back.
      record["peak_mib"] = result.peak_mib
    print_record(record | repeat(call, Limits()))


def print_record(record: dict) -> None:
  """One line of JSON on standard output."""
  rounded = {
    name: float(f"{value:.4g}") if isinstance(value, float) else value
    for name, value in record.items()
  }
  print(json.dumps(rounded), flush=True)


def _forget_peak() -> float | None:
  """Sets the peak back to what is held now, and returns that in MiB."""
  if not sys.platform.startswith("linux"):
    return None
  libc = ctypes.CDLL(None)
  if hasattr(libc, "malloc_trim"):
    libc.malloc_trim(0)  # else memory freed before would hide what is used
  try:
    Path("/proc/self/clear_refs").write_text("5")
  except OSError:
    return None
  return _status("VmRSS")


def _status(name: str) -> float | None:
  if not _STATUS.exists():
    return None
  found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
  return None if found is None else int(found[1]) / 1024
