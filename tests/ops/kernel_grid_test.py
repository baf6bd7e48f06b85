"""Kernels at widths, tokens and heads of all kinds, against the definition.

What lies around the arguments is nan. All cells take more than an hour, and two
cores at least: on one, a simulated TPU was seen to wait for ever.

pytest -m grid tests/ops/kernel_grid_test.py
"""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from examples.benchmarks import gpu_check
from examples.benchmarks.gpu_calls import OPS, Case, call_of
from memcache_jax.testing import assert_close

WIDTHS = (16, 24, 40, 64, 80, 96, 128, 192, 256)
TOKENS = (1, 7, 63, 64, 65, 200)
HEADS = (1, 3)
SIMULATED = {
  "mosaic_tpu": lambda: pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ),
  "triton": gpu_check.interpreted,
}
CALLS = {op: {"op": op} for op in OPS}
CALLS["independent_segments"] = {
  "op": "cached_linear_attention",
  "write_mode": "independent",
}


def _case(call, width, tokens, heads):
  sizes = dict(width=width, tokens=tokens, heads=heads)
  options = dict(dtype="float32", length=16, carried=1)
  return Case(**CALLS[call], **sizes, **options)


def _refusal(width):
  """What a kernel says of a width that it does not take; None if it does."""
  return rf"multiples? of 32.*: got {width}\b" if width % 32 else None


CHOICES = list(itertools.product(CALLS, WIDTHS, SIMULATED))
REFUSED = [
  (call, width, implementation)
  for call, width, implementation in CHOICES
  if _refusal(width)
]
CELLS = [
  (call, width, tokens, heads, implementation)
  for call, width, implementation in CHOICES
  if not _refusal(width)
  for tokens, heads in itertools.product(TOKENS, HEADS)
]
# The first ones are of all kinds; those that are compared with the same stay
# together.
PLACES = {cell[:-1]: random.Random(str(cell[:-1])).random() for cell in CELLS}
CELLS.sort(key=lambda cell: PLACES[cell[:-1]])
# A width and numbers of tokens that no other test has.
SAMPLE = [
  ("cache_read", 192, 1, 1),
  ("selected_read", 192, 7, 1),
  ("delta_rule", 192, 1, 3),
  ("read_networks", 192, 1, 1),
  ("mlp_memory", 192, 65, 1),
]


@pytest.mark.parametrize(("call", "width", "implementation"), REFUSED)
def test_refuses(call, width, implementation):
  """Before anything is compiled."""
  reason = _refusal(width)
  for tokens, heads in ((1, 1), (200, 3)):
    run, arrays = call_of(_case(call, width, tokens, heads))
    run = functools.partial(run, implementation=implementation)
    with pytest.raises(NotImplementedError, match=reason):
      jax.eval_shape(lambda arrays, run=run: run(**arrays), arrays)


def _surround(x):
  return jnp.pad(x, 3, constant_values=jnp.nan)


def _inside(x):
  return x[(slice(3, -3),) * x.ndim]


def _run(case, implementation):
  """Outputs, and the gradients of all arrays where kernels have them."""
  program = gpu_check.program(case, implementation, case.differentiated)
  run = jax.jit(
    lambda arrays: program(jax.tree.map(_inside, arrays)),
    # Wide cells run for minutes where nothing is optimized.
    compiler_options={"xla_backend_optimization_level": 1},
  )
  arrays = jax.tree.map(_surround, gpu_check.arrays_of(case))
  return jax.block_until_ready(run(arrays))


@functools.lru_cache(maxsize=1)
def _expected(case):
  return _run(case, "reference")


def _marked(cell):
  slow = (pytest.mark.slow,) if cell[:-1] in SAMPLE else ()
  return pytest.param(*cell, marks=(pytest.mark.grid, *slow))


@pytest.mark.parametrize(
  ("call", "width", "tokens", "heads", "implementation"), [*map(_marked, CELLS)]
)
def test_equals_the_definition(call, width, tokens, heads, implementation):
  case = _case(call, width, tokens, heads)
  with SIMULATED[implementation]():
    got = _run(case, implementation)
  assert_close(got, _expected(case))
  jax.clear_caches()  # no other cell has a use for them
