"""A run from its first line of output to its last."""

import codecs
import json
import pathlib
from dataclasses import asdict

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from examples.checkpoints import Checkpoints
from examples.interrupt import Interrupt
from examples.quickstart import evaluation, loop, model, ngram, plots
from examples.quickstart.checkpoints import History
from examples.quickstart.data import Corpus
from examples.quickstart.settings import Settings
from examples.workdir import claim
from memcache_jax.decoding import stream

OK, PROOF_FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

NGRAM_ORDERS = (1, 2, 3)
PROOF_BYTES = 600
# Float32 sums in another order differ by far less than this.
TOLERANCE = 1e-3
GENERATED_BYTES = 400


def run(
  settings: Settings, corpus: Corpus, workdir: pathlib.Path, prompt: str
) -> int:
  """Trains, measures, proves, plots and generates; returns the exit code."""
  claim(workdir, asdict(settings))
  console = Console(highlight=False)
  _introduce(console, settings, corpus, workdir)
  references = _references(console, corpus)

  checkpoints = Checkpoints(workdir, console.print)
  with Interrupt() as interrupt:
    state, history = loop.train(
      settings, corpus, checkpoints, console, interrupt
    )
  checkpoints.close()
  done = len(history.losses)
  if done < settings.steps:
    console.print(
      f"Interrupted: step {done:,} of {settings.steps:,} is saved in {workdir}."
      " The same command goes on from there."
    )
    return INTERRUPTED

  texts = evaluation.stretches(corpus.held_out)
  bits = evaluation.bits_per_byte(settings, state.params, texts)
  _show_result(console, settings, corpus, history, bits, references)
  errors = _prove(console, settings, state.params, corpus)
  _write_results(workdir / "results.json", history, bits, references, errors)
  _plot(console, settings, state.params, corpus, workdir, history, references)
  _generate(console, settings, state.params, prompt)
  return OK if max(errors.values()) <= TOLERANCE else PROOF_FAILED


def _introduce(
  console: Console,
  settings: Settings,
  corpus: Corpus,
  workdir: pathlib.Path,
) -> None:
  shapes = jax.tree.leaves(
    jax.eval_shape(lambda: model.initial_params(settings))
  )
  weights = sum(shape.size for shape in shapes)
  table = Table.grid(padding=(0, 2))
  for name, value in {
    "model": (
      f"{weights:,} weights, {settings.num_layers} layers of width "
      f"{settings.dim}, a memory cached every {settings.segment_length} bytes"
    ),
    "trains on": f"{len(corpus.train):,} bytes",
    "held out": f"{len(corpus.held_out):,} bytes: {corpus.description}",
    "steps": (
      f"{settings.steps:,} of {settings.batch_size} windows of "
      f"{settings.window} bytes"
    ),
    "folder": str(workdir),
  }.items():
    table.add_row(name, value)
  console.print(table)


def _references(console: Console, corpus: Corpus) -> dict[str, float]:
  """N-grams, counted and measured on the bytes of the model."""
  end = evaluation.stretches(corpus.held_out)[:, 1:].size + 1
  references = {}
  with console.status("counting n-grams"):
    for order in NGRAM_ORDERS:
      references[f"n-gram of order {order}"] = ngram.bits_per_byte(
        corpus.train, corpus.held_out[:end], order
      )
  return references


def _show_result(
  console: Console,
  settings: Settings,
  corpus: Corpus,
  history: History,
  bits: float,
  references: dict[str, float],
) -> None:
  count = evaluation.stretches(corpus.held_out)[:, 1:].size
  table = Table(title="Bits per held-out byte")
  table.add_column("what")
  table.add_column("bits", justify="right")
  for name, value in references.items():
    table.add_row(f"Witten-Bell {name}", f"{value:.3f}")
  table.add_row("this model", f"{bits:.3f}", style="bold")
  console.print(table)
  tokens = settings.steps * settings.batch_size * settings.window
  console.print(
    f"Measured on {count:,} bytes of {corpus.description}, from its second on,"
    f" streamed: the state is carried for {evaluation.CONTEXT:,} bytes, then "
    f"starts anew. Trained on {tokens:,} bytes in {history.seconds:.0f} s, "
    f"{tokens / history.seconds:,.0f} a second."
  )


def _prove(
  console: Console, settings: Settings, params: nnx.State, corpus: Corpus
) -> dict[str, float]:
  """Compares streamed logits with those of one parallel call."""
  passage = _passage(corpus, PROOF_BYTES)
  errors = {
    name: evaluation.streaming_error(settings, params, passage, piece)
    for name, piece in {"byte by byte": 1, "50 bytes at a time": 50}.items()
  }
  for name, error in errors.items():
    verdict = "equals" if error <= TOLERANCE else "DIFFERS FROM"
    console.print(
      f"Streaming {len(passage)} held-out bytes {name} {verdict} one parallel "
      f"pass: largest difference of a logit {error:.1e}."
    )
  return errors


def _passage(corpus: Corpus, length: int) -> np.ndarray:
  """From the middle of the held-out text."""
  start = (len(corpus.held_out) - length) // 2
  return corpus.held_out[start : start + length]


def _write_results(
  path: pathlib.Path,
  history: History,
  bits: float,
  references: dict[str, float],
  errors: dict[str, float],
) -> None:
  results = {
    "held_out_bits_per_byte": bits,
    "references": references,
    "streaming_errors": errors,
    "losses": history.losses,
    "probes": history.probes,
    "training_seconds": history.seconds,
  }
  path.write_text(json.dumps(results, indent=1) + "\n")


def _plot(
  console: Console,
  settings: Settings,
  params: nnx.State,
  corpus: Corpus,
  workdir: pathlib.Path,
  history: History,
  references: dict[str, float],
) -> None:
  gates = evaluation.segment_gates(
    settings, params, _passage(corpus, 2 * settings.window)
  )
  loss, passage = workdir / "loss.png", workdir / "segment_gates.png"
  replaced = loss.exists() or passage.exists()
  plots.loss_curve(loss, history, references)
  plots.segment_gates(passage, gates, settings.segment_length)
  console.print(
    f"Wrote {loss} and {passage}"
    + (", in place of those of the last run." if replaced else ".")
  )


def _generate(
  console: Console, settings: Settings, params: nnx.State, prompt: str
) -> None:
  """Prints the prompt, and each byte after it as it is drawn."""
  console.rule("generated, one byte at a time")
  decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
  print(prompt, end="", flush=True)
  steps = stream(
    model.with_params(settings, params),
    [list(prompt.encode())],
    max_new_tokens=GENERATED_BYTES,
    temperature=0.7,
    key=jax.random.key(settings.seed),
  )
  for (byte,) in steps:
    assert byte is not None  # there are no stop tokens
    text = decoder.decode(bytes([byte]))
    print(_printable(text), end="", flush=True)
  print(decoder.decode(b"", final=True))


def _printable(text: str) -> str:
  """What a terminal cannot misread as a command."""
  return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
