"""What networks that train as they read cost on a TPU; part of `tpu_schedule`.

What happens in the first inner batch only counts in every one.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

from examples.benchmarks.tpu_schedule import (
  BYTES_PER_CYCLE,
  CYCLES_PER_SECOND,
  FLOPS_PER_CYCLE,
  count_bundles,
  xla_cycles,
)
from examples.benchmarks.tpu_schedule_reads import array

KERNEL = "memcache_mlp_memory_batches"


@dataclass(frozen=True)
class Batches:
  """Titans, forwards: 4096 tokens of 8 heads, bfloat16, two maps.

  Attributes:
    inner_batch: tokens of one.
    width: of keys and values.
    hidden: width between the maps.
  """

  inner_batch: int
  width: int = 128
  hidden: int = 512
  tokens: int = 4096
  heads: int = 8

  @property
  def flops(self) -> float:
    """Of all products.

    Of both maps: keys forwards, queries through weights and momentum, and what
    is written to both; keys backwards through one; and pairs of tokens.
    """
    maps = 11 * 2 * self.width * self.hidden
    pairs = 2 * 2 * self.inner_batch * (self.width + self.hidden)
    return self.heads * self.tokens * (maps + pairs)


CASES = [Batches(16), Batches(64)]


def measure(case: Batches, dump: Path) -> dict:
  """One row of the table."""
  import jax

  from memcache_jax.ops.mlp_memory import L2, MLP, mlp_memory

  t, n, w = case.tokens, case.heads, case.width
  network = MLP(hidden_factor=case.hidden // w)
  params = {
    "w_in": array(n, w, case.hidden),
    "w_out": array(n, case.hidden, w),
    "ln_gain": array(n, w),
    "ln_bias": array(n, w),
  }
  x, gate = array(1, t, n, w, dtype="bfloat16"), array(1, t, n)

  def run(implementation, x, params, step, gate):
    return mlp_memory(
      *(x, x, x, params),
      architecture=network,
      loss=L2(),
      inner_batch=case.inner_batch,
      step=step,
      log_decay=gate,
      momentum=gate,
      implementation=implementation,
    )

  arrays = x, params, array(1, t, n, 1), gate
  compiled = {
    name: jax.jit(functools.partial(run, name)).lower(*arrays).compile()
    for name in ("mosaic_tpu", "xla")
  }
  memory = compiled["mosaic_tpu"].memory_analysis()
  depths, spilling = count_bundles(dump, KERNEL)
  cycles = depths[0] + depths[1] * n * (t // case.inner_batch)
  traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
  around = xla_cycles(compiled["mosaic_tpu"].as_text())
  estimate = xla_cycles(compiled["xla"].as_text())
  return {
    "inner batch": case.inner_batch,
    "bundles by depth": "/".join(str(depths[i]) for i in range(3)),
    "spilling": spilling,
    "cycles": round(cycles),
    "of the bound": f"{case.flops / FLOPS_PER_CYCLE / cycles:.0%}",
    "ms": f"{cycles / CYCLES_PER_SECOND * 1e3:.2f}",
    "memory cycles": round(traffic / BYTES_PER_CYCLE),
    "temporaries": memory.temp_size_in_bytes,
    "around it, XLA cycles": round(around),
    "XLA cycles": round(estimate),
    "XLA / both": f"{estimate / (cycles + around):.1f}x",
  }
