"""Values and times of the kernels on a GPU, next to the XLA form.

python -m examples.benchmarks.gpu_check

This needs a GPU of NVIDIA and ``pip install "memcache-jax[cuda]"``: it says so
and stops where there is none. Every call is first compared with the
definition, token by token, in values and all gradients, at a length that the
definition can take; then with the XLA form at the length that is timed. What
differs is not timed: the run ends with an error.
"""

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp

from examples.benchmarks import machine
from memcache_jax import ops
from memcache_jax.testing import assert_close

HEADS = 8
# Relative error of two results that round differently; the XLA form may also
# round operands of products of float32.
TOLERANCE = {
  ("float32", "reference"): 1e-4,
  ("float32", "xla"): 5e-3,
  ("bfloat16", "reference"): 3e-2,
  ("bfloat16", "xla"): 3e-2,
}
SIZES = [
  {"dtype": dtype, "width": width}
  for dtype in ("bfloat16", "float32")
  for width in (64, 96, 128, 256)
]
CASES = [
  {"op": "cached_linear_attention", **sizes, "write_mode": mode, "length": c}
  for sizes in SIZES
  for mode, c in (("independent", 256), ("checkpoint", 64))
]
CASES += [
  {"op": op, **sizes, "length": 256}
  for op in ("cache_read", "delta_rule")
  for sizes in SIZES
]


def arrays_of(case: dict, tokens: int) -> dict[str, jax.Array]:
  """Unit queries and keys, gates in [0, 1]; decays but in independent mode."""
  keys = iter(jax.random.split(jax.random.key(0), 7))
  normal = lambda *axes: jax.random.normal(next(keys), axes)
  gate = lambda *axes: jax.nn.sigmoid(normal(*axes))
  tall, width = (1, tokens, HEADS), case["width"]
  states = -(-tokens // case["length"])
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  arrays = {name: unit(normal(*tall, width)) for name in "qk"}
  arrays["v"] = normal(*tall, width)
  arrays = {name: x.astype(case["dtype"]) for name, x in arrays.items()}
  if case["op"] == "cache_read":
    return {
      "q": arrays["q"],
      "states": normal(1, states, HEADS, width, width),
      "weights": gate(*tall, states),
    }
  if case["op"] == "delta_rule":
    arrays["beta"] = gate(*tall)
  else:
    arrays["weights"] = gate(*tall, states)
    arrays["own_weight"] = gate(*tall)
  if case.get("write_mode") != "independent":
    arrays["log_decay"] = 0.1 * jnp.log(gate(*tall))
  if case.get("write_mode") == "checkpoint":
    arrays["write"] = gate(*tall)
  return arrays


def program(case: dict, implementation: str, gradients: bool):
  """The compiled call: outputs, or outputs and the gradients of all arrays."""
  options = {}
  if "write_mode" in case:
    options["write_mode"] = case["write_mode"]
    options["segment_length"] = case["length"]
  run = functools.partial(
    getattr(ops, case["op"]), **options, implementation=implementation
  )

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


def compare(case: dict, tokens: int, other: str) -> None:
  """Ends the run where the kernel differs from another implementation."""
  arrays = arrays_of(case, tokens)
  got = program(case, "triton", True)(arrays)
  if other == "reference":  # of the same numbers, nothing rounded after
    arrays = {name: x.astype(jnp.float32) for name, x in arrays.items()}
  expected = program(case, other, True)(arrays)
  tolerance = TOLERANCE[case["dtype"], other]
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


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--tokens", type=int, default=8192, help="timed")
  parser.add_argument("--cases", type=int, default=len(CASES))
  options = parser.parse_args(argv)
  device = jax.devices()[0]
  if device.platform != "gpu":
    raise SystemExit(f"This needs a GPU: jax has found {device}.")
  print(json.dumps({**machine.describe(), "gpu": device.device_kind}))
  for case in CASES[: options.cases]:
    compare(case, 4 * case["length"] + 37, "reference")
    compare(case, options.tokens, "xla")
    arrays, row = arrays_of(case, options.tokens), dict(case)
    for gradients in (False, True):
      times = {
        name: milliseconds(program(case, name, gradients), arrays)
        for name in ("triton", "xla")
      }
      row["gradients ms" if gradients else "forward ms"] = {
        name: round(x, 3) for name, x in times.items()
      }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main()
