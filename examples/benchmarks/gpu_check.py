"""Values and times of the kernels on a GPU, next to the XLA form.

python -m examples.benchmarks.gpu_check

This needs a GPU of NVIDIA and ``pip install "memcache-jax[cuda]"``: it says so
and stops where there is none. Every call is first compared with the
definition, in values and all gradients, at a length that the definition can
take; then with the XLA form at the length that is timed. What differs is not
timed: the run ends with an error.

``--interpret`` needs none: it compares short calls in float32 with the
definition, with kernels that are simulated, and times nothing.
"""

import argparse
import functools
import importlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp

from examples.benchmarks import machine
from examples.benchmarks.gpu_calls import OPS, Case, call_of
from memcache_jax.testing import assert_close

# Relative error of two results that round differently; the XLA form may also
# round operands of products of float32.
TOLERANCE = {
  ("float32", "reference"): 1e-4,
  ("float32", "xla"): 5e-3,
  ("bfloat16", "reference"): 3e-2,
  ("bfloat16", "xla"): 3e-2,
}
CASES = [
  Case(op, width, dtype, **options)
  for op in OPS
  for dtype in ("bfloat16", "float32")
  for width in (64, 96, 128, 256)
  for options in (
    [{"write_mode": "independent"}, {"length": 64}]
    if op == "cached_linear_attention"
    else [{}]
  )
]
INTERPRETED = [
  Case(op, 64, "float32", length=16, tokens=37, heads=2) for op in OPS
]
# What runs the kernels.
KERNELS = {
  "cache_read.triton": ("fwd",),
  "cache_read.triton_selected": ("fwd", "bwd"),
  "cache_read.triton_vjp": ("bwd",),
  "delta_rule.triton": ("fwd",),
  "delta_rule.triton_vjp": ("bwd",),
  "linear_attention.triton": ("fwd",),
  "linear_attention.triton_vjp": ("bwd",),
  "mlp_memory.triton": ("fwd",),
  "mlp_memory.triton_batches": ("fwd",),
  "mlp_memory.triton_selected": ("fwd", "bwd"),
  "mlp_memory.triton_vjp": ("bwd",),
}


def arrays_of(case: Case):
  """Unit queries and keys; what there is of gates, matrices and networks."""
  paths, tree = jax.tree_util.tree_flatten_with_path(call_of(case)[1])
  keys = jax.random.split(jax.random.key(0), len(paths))
  arrays = [
    _numbers(path[-1].key, x.shape, key).astype(x.dtype)
    for (path, x), key in zip(paths, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, arrays)


def _numbers(name, shape, key):
  normal = jax.random.normal(key, shape)
  match name:
    case "q" | "k":
      return normal / jnp.linalg.norm(normal, axis=-1, keepdims=True)
    case "v":
      return normal
    case "weights" | "own_weight" | "write" | "beta" | "momentum":
      return jax.nn.sigmoid(normal)
    case "step":
      return jax.nn.sigmoid(normal) / 64
    case "log_decay":
      return 0.1 * jax.nn.log_sigmoid(normal)
    case _:
      return normal / shape[-2] ** 0.5


def program(case: Case, implementation: str, gradients: bool):
  """The compiled call: outputs, or outputs and the gradients of all arrays."""
  run = functools.partial(call_of(case)[0], implementation=implementation)

  def loss(arrays):
    outputs = jax.tree.leaves(run(**arrays))
    keys = jax.random.split(jax.random.key(1), len(outputs))
    products = [
      jnp.vdot(x.astype(jnp.float32), jax.random.normal(key, x.shape))
      for key, x in zip(keys, outputs, strict=True)
    ]
    return sum(products), outputs

  if gradients:
    return jax.jit(jax.grad(loss, has_aux=True))
  return jax.jit(lambda arrays: run(**arrays))


def compare(case: Case, other: str) -> None:
  """Ends the run where the kernel differs from another implementation."""
  arrays = arrays_of(case)
  got = program(case, "triton", case.differentiated)(arrays)
  if other == "reference":  # of the same numbers, nothing rounded after
    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
  expected = program(case, other, case.differentiated)(arrays)
  tolerance = TOLERANCE[case.dtype, other]
  assert_close(jax.device_get(got), jax.device_get(expected), tolerance)


def milliseconds(call, arrays, repeats: int = 20) -> float:
  """Median wall time of a call that ran before."""
  jax.block_until_ready(call(arrays))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(call(arrays))
    times.append(time.perf_counter() - start)
  return sorted(times)[repeats // 2] * 1e3


@contextmanager
def interpreted() -> Iterator[None]:
  """Simulates the kernels."""
  kept = []
  for name, functions in KERNELS.items():
    module = importlib.import_module(f"memcache_jax.pallas_kernels.{name}")
    for function in functions:
      run = getattr(module, function)
      kept.append((module, function, run))
      setattr(module, function, functools.partial(run, interpret=True))
  try:
    yield
  finally:
    for module, function, run in kept:
      setattr(module, function, run)


def check_interpreted() -> None:
  for case in INTERPRETED:
    with interpreted():
      compare(case, "reference")
    print(json.dumps(asdict(case)), flush=True)


def check_and_time(case: Case, tokens: int) -> None:
  compare(replace(case, tokens=4 * case.length + 37), "reference")
  case = replace(case, tokens=tokens)
  compare(case, "xla")
  arrays, row = arrays_of(case), asdict(case)
  for gradients in (False, True) if case.differentiated else (False,):
    times = {
      name: milliseconds(program(case, name, gradients), arrays)
      for name in ("triton", "xla")
    }
    row["gradients ms" if gradients else "forward ms"] = {
      name: round(x, 3) for name, x in times.items()
    }
  print(json.dumps(row), flush=True)


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--tokens", type=int, default=8192, help="timed")
  parser.add_argument("--cases", type=int, default=len(CASES))
  parser.add_argument("--interpret", action="store_true", help="simulate")
  options = parser.parse_args(argv)
  if options.interpret:
    check_interpreted()
    return
  device = jax.devices()[0]
  if device.platform != "gpu":
    raise SystemExit(f"This needs a GPU: jax has found {device}.")
  print(json.dumps({**machine.describe(), "gpu": device.device_kind}))
  for case in CASES[: options.cases]:
    check_and_time(case, options.tokens)


if __name__ == "__main__":
  main()
