"""Times one case of this library, after checking it; prints JSON lines."""

import argparse
import functools
import time

from examples.benchmarks import cases, measure

# Tokens of deep memories whose results are checked: two segments of the cases.
CHECKED = 128


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  case, arguments = cases.parse(parser, "memcache_jax", argv)
  measure.use_one_core(arguments.core)
  run(case, measure.Limits())


def run(case: cases.Case, limits: measure.Limits) -> None:
  """Checks, then times; raises WrongResultError and times nothing if wrong."""
  # Only now: XLA reads the flags of `use_one_core` when it is loaded.
  import jax

  import memcache_jax
  from examples.benchmarks import check, layers

  measure.warm_up_jax()
  layer = layers.build(case)
  shape = (cases.BATCH, case.tokens, cases.DIM)
  x = jax.random.normal(jax.random.key(9), shape)

  def forward(params, x):
    return layer.apply(params, x, None)[0]

  def loss(params, x):
    return layers.loss(forward(params, x))

  functions = {"forward_backward": jax.grad(loss), "forward": forward}
  programs, firsts, seconds = {}, {}, {}
  for mode in cases.MODES:
    start = time.perf_counter()
    program = jax.jit(functions[mode]).lower(layer.params, x).compile()
    seconds[mode] = time.perf_counter() - start
    programs[mode] = functools.partial(_wait_for, program, layer.params, x)
    firsts[mode] = measure.first(programs[mode])

  # The very programs that are timed, on the very inputs. Deep memories blow up
  # the rounding of any two programs within some hundred tokens, as their layer
  # norm divides by what may be small: of those, the same on fewer tokens.
  y, gradient = (firsts[mode].result for mode in reversed(cases.MODES))
  if case.memory in ("titans", "delayed_titans", "dla"):
    # In a delayed one, tokens of the first inner batch read no write.
    first = case.inner_batch if case.memory == "delayed_titans" else 0
    x = x[:, : first + CHECKED]
    y, gradient = (
      jax.jit(functions[mode])(layer.params, x)
      for mode in reversed(cases.MODES)
    )
  errors = check.errors(
    layers.build(case, implementation="reference"),
    layer.params,
    x,
    y,
    gradient,
  )
  check.require_right(errors)
  for mode in cases.MODES:
    record = {
      **vars(case),
      "mode": mode,
      "version": memcache_jax.__version__,
      "backend": f"jax {jax.__version__}",
      "first_call_s": seconds[mode] + firsts[mode].seconds,
      "check": max(errors.values()),
    }
    if mode == "forward_backward":
      # What comes after it finds memory that was never given back.
      record["peak_mib"] = firsts[mode].peak_mib
    record |= measure.repeat(programs[mode], limits)
    measure.print_record(record)


def _wait_for(program, *inputs):
  import jax

  return jax.block_until_ready(program(*inputs))


if __name__ == "__main__":
  main()
