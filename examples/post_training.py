"""Caching for a model trained without it: `python -m examples.post_training`.

Trains a small byte-level model with a recurrent memory on short windows, and
then measures the same weights on texts eight times as long: as they are, and
with the memory cached after every window. Nothing is trained again.
"""

import argparse
import functools
import pathlib
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.table import Table

from examples.quickstart import data, model, training
from examples.quickstart.settings import Settings
from examples.workdir import InputError
from memcache_jax.caching import (
  Aggregator,
  Cached,
  Constant,
  GatedResidual,
  MovingAverage,
)
from memcache_jax.memories import Memory, Titans
from memcache_jax.models import LanguageModel, MemorySpec, ModelConfig

TRAINED = Titans()

# None of these has a gate of its own, hence no weight that was not trained.
VARIANTS = {
  "mean of parameters": MovingAverage(),
  "mean of outputs": MovingAverage(of="outputs"),
  "parameters, rate 0.5": MovingAverage(rate=0.5),
  "gated, with u = q": GatedResidual(gate="shared"),
}

WINDOW = 128
# Ends of the buckets of positions, in windows; the text is cut there.
BUCKETS = (1, 2, 4, 8)
ROWS = 16


def config(settings: Settings, memory: Memory) -> ModelConfig:
  """The quickstart's model with another memory."""
  pattern = (MemorySpec(memory, settings.num_heads),)
  return replace(model.config(settings), pattern=pattern)


def cached(
  trained: LanguageModel, settings: Settings, aggregate: Aggregator
) -> LanguageModel:
  """A trained model whose memory is cached after every window."""
  memory = Cached(TRAINED, Constant(settings.window), aggregate, "checkpoint")
  other = LanguageModel(config(settings, memory), rngs=nnx.Rngs(0))
  nnx.update(other, nnx.state(trained))
  return other


def train(settings: Settings, text: np.ndarray) -> LanguageModel:
  """Trains the memory by itself, on windows."""
  untrained = LanguageModel(
    config(settings, TRAINED), rngs=nnx.Rngs(settings.seed)
  )
  structure, params = nnx.split(untrained)
  state = training.begin(settings, params)
  batches = data.training_batches(
    text, settings.window, settings.batch_size, settings.seed
  )
  for _ in range(settings.steps):
    state, _ = _update(settings, structure, state, next(batches))
  return nnx.merge(structure, state.params)


_update = functools.partial(
  jax.jit,
  static_argnames=("settings", "structure"),
  donate_argnames="state",
)(training.update)


def bits_by_bucket(
  measured: LanguageModel, texts: Int[np.ndarray, "s t_plus_1"], window: int
) -> list[float]:
  """Mean of -log2 p of the bytes in each bucket of positions."""
  rows = [
    _bits(measured, texts[first : first + ROWS])
    for first in range(0, len(texts), ROWS)
  ]
  by_position = np.concatenate(jax.device_get(rows)).mean(axis=0)
  ends = [end * window for end in BUCKETS]
  return [
    float(by_position[start:end].mean())
    for start, end in zip([0, *ends], ends, strict=False)
  ]


@jax.jit
def _bits(
  measured: LanguageModel, texts: Int[Array, "b t_plus_1"]
) -> Float[Array, "b t"]:
  """Bits of every byte but the first, each row from an empty state."""
  logits, _ = measured(texts[:, :-1])
  log_p = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(log_p, texts[:, 1:, None], axis=-1)
  return -training.BITS_PER_NAT * picked[..., 0]


def run(
  settings: Settings, corpus: data.Corpus, at_most: int | None = None
) -> dict[str, list[float]]:
  """Trains, measures every variant, and prints the table.

  Args:
    settings: of model and training.
    corpus: what to learn from and what to measure on.
    at_most: texts to measure on; None for all.

  Returns:
    Bits per byte in each bucket, by variant.
  """
  console = Console(highlight=False)
  start = time.perf_counter()
  trained = train(settings, corpus.train)
  jax.block_until_ready(nnx.state(trained))
  seconds = time.perf_counter() - start
  length = BUCKETS[-1] * settings.window
  windows = data.ByteWindows(corpus.held_out, length)
  count = len(windows) if at_most is None else min(at_most, len(windows))
  texts = np.stack([windows[i * len(windows) // count] for i in range(count)])

  results = {"no caching": bits_by_bucket(trained, texts, settings.window)}
  for name, aggregate in VARIANTS.items():
    with_cache = cached(trained, settings, aggregate)
    results[name] = bits_by_bucket(with_cache, texts, settings.window)

  table = Table(title="Bits per held-out byte, by its position in the text")
  table.add_column("cache after training")
  for first, last in zip((0, *BUCKETS), BUCKETS, strict=False):
    table.add_column(
      f"{first * settings.window}-{last * settings.window}", justify="right"
    )
  for name, bits in results.items():
    table.add_row(name, *(f"{value:.3f}" for value in bits))
  console.print(table)
  tokens = settings.steps * settings.batch_size * settings.window
  console.print(
    f"Trained on {tokens:,} bytes in windows of {settings.window}, in "
    f"{seconds:.0f} s; measured on {count} texts of {length:,} bytes from "
    f"{corpus.description}. A cached state every {settings.window} bytes."
  )
  return results


def main(arguments: list[str] | None = None) -> int:
  """Reads the command line; returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m examples.post_training",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--text", type=pathlib.Path, metavar="FILE", help="UTF-8 text to train on"
  )
  parser.add_argument("--steps", type=int, default=600, help="training steps")
  parser.add_argument("--seed", type=int, default=0, help="of the weights")
  options = parser.parse_args(arguments)
  if options.steps < 1:
    parser.error(f"--steps: must be at least 1, got {options.steps}")
  try:
    corpus = data.load(options.text)
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  settings = Settings(
    corpus.sha256,
    seed=options.seed,
    steps=options.steps,
    batch_size=8,
    window=WINDOW,
  )
  run(settings, corpus, at_most=128)
  return 0


if __name__ == "__main__":
  sys.exit(main())
