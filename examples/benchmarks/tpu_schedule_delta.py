"""What the delta rule costs on a TPU; part of `tpu_schedule`.

The bound counts the products of the chunked form, each once and in full, but
not those that make the inverse of a chunk's triangular matrix: they are the
algorithm's price, not its purpose. The XLA form, whose chunks are all alike, is
compiled for an eighth of the tokens, and its estimate multiplied by 8: whole it
takes minutes.
"""

from dataclasses import dataclass
from pathlib import Path

from examples.benchmarks.tpu_schedule import (
  BYTES_PER_CYCLE,
  CYCLES_PER_SECOND,
  FLOPS_PER_CYCLE,
  count_bundles,
  xla_cycles,
)
from examples.benchmarks.tpu_schedule_reads import array, module_of

CHUNK = 128
# Of the tokens, for which the XLA form is compiled.
PART = 8


@dataclass(frozen=True)
class Rule:
  """One call of the gated rule: 4096 tokens of 8 heads, bfloat16."""

  width: int
  backward: bool = False
  tokens: int = 4096
  heads: int = 8

  @property
  def kernels(self) -> list[str]:
    names = ["states", "bwd"] if self.backward else ["fwd"]
    return [f"memcache_delta_rule_{name}" for name in names]

  @property
  def flops(self) -> float:
    """Of the products of all chunks."""
    inside, state = CHUNK**2 * self.width, CHUNK * self.width**2
    # Forwards: of keys, of queries with keys, the inverse and the scores with
    # values; memories read by keys and by queries, and written.
    products = 4 * inside + 3 * state
    if self.backward:
      products = 10 * inside + 7 * state
    return 2 * products * self.heads * self.tokens / CHUNK


CASES = [Rule(width, back) for back in (False, True) for width in (128, 256)]


def _kernels(rule: Rule):
  """The kernels, their arguments, and steps of their grids."""
  t, n, w = rule.tokens, rule.heads, rule.width
  pieces = module_of("delta_rule.config")
  config = pieces.config(pieces.Call(w, w, "bfloat16", n))
  tokens, state = array(1, n, t, w, dtype="bfloat16"), array(1, n, w, w)
  arrays = [tokens, tokens, tokens, array(1, n, 8, t), state]
  if rule.backward:
    arrays += [tokens, state]

  def run(*arrays):
    operands = module_of("delta_rule.operands").Operands(*arrays[:5])
    if rule.backward:
      module = module_of("delta_rule.mosaic_tpu_vjp")
      return module.bwd(operands, *arrays[5:], config=config)
    return module_of("delta_rule.mosaic_tpu").fwd(operands, config=config)

  return run, arrays, n // config.heads * (t // CHUNK)


def _xla_cycles(rule: Rule) -> float:
  """The estimate for the XLA form, in chunks of 64 tokens."""
  import jax

  from memcache_jax.ops import delta_rule

  t, n, w = rule.tokens // PART, rule.heads, rule.width
  tokens = array(1, t, n, w, dtype="bfloat16")
  arrays = [tokens, tokens, tokens, array(1, t, n), array(1, t, n)]

  def run(q, k, v, beta, log_decay):
    return delta_rule(
      *(q, k, v, beta), log_decay=log_decay, implementation="xla"
    )

  def pull(gradients, *arrays):
    # Of the forward pass only what gradients need is left.
    return jax.vjp(run, *arrays)[1](gradients)

  form = run
  if rule.backward:
    form, arrays = pull, [(tokens, array(1, n, w, w)), *arrays]
  return PART * xla_cycles(jax.jit(form).lower(*arrays).compile().as_text())


def measure(rule: Rule, dump: Path) -> dict:
  """One row of the table."""
  import jax

  run, arrays, steps = _kernels(rule)
  memory = jax.jit(run).lower(*arrays).compile().memory_analysis()
  cycles, spilling, bundles = 0, 0, []
  for kernel in rule.kernels:
    depths, spills = count_bundles(dump, kernel)
    cycles += depths[0] + depths[1] * steps
    spilling += spills
    bundles.append(str(depths[1]))
  estimate = _xla_cycles(rule)
  traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
  return {
    "width": rule.width,
    "call": "backward" if rule.backward else "forward",
    "bundles of a step": " + ".join(bundles),
    "spilling": spilling,
    "cycles": cycles,
    "of the bound": f"{rule.flops / FLOPS_PER_CYCLE / cycles:.0%}",
    "ms": f"{cycles / CYCLES_PER_SECOND * 1e3:.2f}",
    "memory cycles": round(traffic / BYTES_PER_CYCLE),
    "XLA cycles": round(estimate),
    "XLA / kernel": f"{estimate / cycles:.1f}x",
  }
