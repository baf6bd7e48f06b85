"""Caching for a model trained without it: `python -m examples.post_training`.

Trains a small byte-level model with a recurrent memory on short windows, and
then measures the same weights on texts eight times as long, or --longest: as
they are, and with the memory cached after every window. Nothing is trained
again.
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

TOKENS = 16 * 1024  # measured together


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


def bucket_ends(window: int, longest: int) -> list[int]:
  """Ends of the buckets of positions: the window, and then its doubles."""
  ends = [window]
  while 2 * ends[-1] <= longest:
    ends.append(2 * ends[-1])
  return ends


def bits_by_bucket(
  measured: LanguageModel,
  texts: Int[np.ndarray, "s t_plus_1"],
  ends: list[int],
) -> list[float]:
  """Mean of -log2 p of the bytes in each bucket of positions.

  Perplexity is 2 to the power of it.
  """
  rows = max(1, TOKENS // ends[-1])
  bits = [
    _bits(measured, texts[first : first + rows])
    for first in range(0, len(texts), rows)
  ]
  by_position = np.concatenate(jax.device_get(bits)).mean(axis=0)
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
  settings: Settings,
  corpus: data.Corpus,
  longest: int,
  at_most: int | None = None,
) -> dict[str, list[float]]:
  """Trains, measures every variant, and prints the table.

  Args:
    settings: of model and training.
    corpus: what to learn from and what to measure on.
    longest: bytes of the texts to measure on, at most: the window as often
      doubled as fits.
    at_most: texts to measure on; None for all.

  Returns:
    Bits per byte in each bucket, by variant.

  Raises:
    InputError: if no such text is held out.
  """
  console = Console(highlight=False)
  ends = bucket_ends(settings.window, longest)
  windows = data.ByteWindows(corpus.held_out, ends[-1])
  if not len(windows):
    raise InputError(
      f"only {len(corpus.held_out):,} bytes are held out: choose --longest "
      "below that"
    )
  start = time.perf_counter()
  trained = train(settings, corpus.train)
  jax.block_until_ready(nnx.state(trained))
  seconds = time.perf_counter() - start
  count = len(windows) if at_most is None else min(at_most, len(windows))
  texts = np.stack([windows[i * len(windows) // count] for i in range(count)])

  results = {"no caching": bits_by_bucket(trained, texts, ends)}
  for name, aggregate in VARIANTS.items():
    with_cache = cached(trained, settings, aggregate)
    results[name] = bits_by_bucket(with_cache, texts, ends)

  table = Table(title="Bits per held-out byte, by its position in the text")
  table.add_column("cache after training")
  for first, last in zip((0, *ends), ends, strict=False):
    table.add_column(f"{first}-{last}", justify="right")
  for name, bits in results.items():
    table.add_row(name, *(f"{value:.3f}" for value in bits))
  console.print(table)
  tokens = settings.steps * settings.batch_size * settings.window
  console.print(
    f"Trained on {tokens:,} bytes in windows of {settings.window}, in "
    f"{seconds:.0f} s; measured on {count} texts of {ends[-1]:,} bytes from "
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
  parser.add_argument(
    "--window", type=int, default=128, help="bytes to train on at a time"
  )
  parser.add_argument(
    "--longest", type=int, help="bytes to measure on; 8 windows if not given"
  )
  options = parser.parse_args(arguments)
  longest = 8 * options.window if options.longest is None else options.longest
  for name, value, least in (
    ("steps", options.steps, 1),
    ("window", options.window, 1),
    ("longest", longest, options.window),
  ):
    if value < least:
      parser.error(f"--{name}: must be at least {least}, got {value}")
  try:
    corpus = data.load(options.text)
    settings = Settings(
      corpus.sha256,
      seed=options.seed,
      steps=options.steps,
      batch_size=8,
      window=options.window,
    )
    # As many bytes, however long the texts.
    run(settings, corpus, longest, at_most=max(1, 128 * 1024 // longest))
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
