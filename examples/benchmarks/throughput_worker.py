"""Checks one model of `throughput`, then times it at every length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.benchmarks import check, measure, models

GIB = 2**30
SIZES = models.Sizes()
TRAINING = measure.Limits(calls=7, seconds=3.0, least=1)
# Few enough to close no segment.
DECODING = measure.Limits(calls=60, seconds=1.5, least=5)


class Most(NamedTuple):
  """What a step may take; one that takes more is left out.

  Attributes:
    seconds: of a training step, taken to grow with the square of the length
      from the last that was timed.
    gib: temporary memory of a training step, as its program says.
  """

  seconds: float
  gib: float


def run(
  name: str,
  lengths: list[int],
  most: Most,
  sizes: models.Sizes = SIZES,
  limits: measure.Limits = TRAINING,
) -> None:
  """Prints a record for each length and mode.

  Args:
    name: of the model.
    lengths: tokens.
    most: what a training step may take.
    sizes: of the model.
    limits: when to stop repeating a training step.

  Raises:
    WrongResultError: before any time is taken.
  """
  made = models.functions(models.config(name, sizes))
  definition = models.functions(models.config(name, sizes, "reference"))
  errors = models.errors(made, definition, sizes)
  check.require_right(errors)
  labels = {"model": name, "check": max(errors.values())}
  last = None
  for tokens in sorted(lengths):
    record = {**labels, "tokens": tokens, "mode": "train"}
    if last is not None and _quadratic(last, tokens) > most.seconds:
      record["left_out"] = f"over {most.seconds:g} s"
    else:
      record |= _train(made, tokens, most, limits)
    if "cpu_ms" in record:
      last = record
    measure.print_record(record)
    record = {**labels, "tokens": tokens, "mode": "decode"}
    measure.print_record(record | _decode(made, sizes, tokens))


def _quadratic(last: dict, tokens: int) -> float:
  """Seconds at a length, if they grow with its square."""
  return last["cpu_ms"] / 1e3 * (tokens / last["tokens"]) ** 2


def _train(made, tokens, most, limits) -> dict:
  text = models.ids(tokens + 1)
  program = made.gradient.lower(made.params, text).compile()
  needed = program.memory_analysis().temp_size_in_bytes / GIB
  if needed > most.gib:
    return {"left_out": f"{needed:.1f} GiB"}
  call = lambda: jax.block_until_ready(program(made.params, text))
  loss, gradient = call()
  finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((loss, gradient))]
  if not all(finite):
    raise check.WrongResultError("Not timed, because the result is not finite.")
  return measure.repeat(call, limits) | {"gib": needed}


def _decode(made, sizes, tokens) -> dict:
  # Room for a first call and for those that are timed.
  state = models.after(made, sizes, tokens, DECODING.calls + 1)
  one = models.ids(1)
  logits, state = jax.block_until_ready(made.read(made.params, one, state))
  if not jnp.all(jnp.isfinite(logits)):
    raise check.WrongResultError("Not timed, because the result is not finite.")
  kept = [state]

  def call():
    logits, kept[0] = made.read(made.params, one, kept[0])
    jax.block_until_ready((logits, kept[0]))

  return measure.repeat(call, DECODING)
