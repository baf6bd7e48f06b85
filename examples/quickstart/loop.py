"""The training loop: progress, probes, checkpoints, and a clean stop."""

import math
import time

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TextColumn,
  TimeRemainingColumn,
)

from examples.checkpoints import Checkpoints
from examples.interrupt import Interrupt
from examples.quickstart import evaluation, training
from examples.quickstart.checkpoints import History, restore, save
from examples.quickstart.data import Corpus, training_batches
from examples.quickstart.settings import Settings
from examples.train_state import TrainState
from examples.workdir import InputError

# Probes and checkpoints of a whole run, evenly spaced.
MILESTONES = 6


def train(
  settings: Settings,
  corpus: Corpus,
  checkpoints: Checkpoints,
  console: Console,
  interrupt: Interrupt,
) -> tuple[TrainState, History]:
  """Trains from the last checkpoint, or from nothing, to the last step.

  Returns:
    The state and its history: after the last step, or after the step at
    which an interrupt was noticed; both are saved.
  """
  batches = training_batches(
    corpus.train, settings.window, settings.batch_size, settings.seed
  )
  # Placed as a restored one is, so that both run the same compiled code.
  state = jax.device_put(training.initial_state(settings), jax.devices()[0])
  history = History()
  restored = restore(checkpoints, state, batches)
  if restored is not None:
    state, history = restored
    if len(history.losses) == settings.steps:
      console.print("This run is finished: only measuring it again.")
      return state, history
    console.print(f"Resuming after step {len(history.losses):,}.")

  with _progress(console) as progress:
    bar = _Bar(progress, settings, history, corpus.held_out)
    pending = None
    every = -(-settings.steps // MILESTONES)
    for step in range(len(history.losses) + 1, settings.steps + 1):
      batch = jax.device_put(next(batches))
      with jax.transfer_guard("disallow"):
        state, loss = training.train_step(settings, state, batch)
      # While the device computes this step, read what the last one left.
      if pending is not None:
        bar.record(pending, state)
      pending = loss
      milestone = step % every == 0 or step == settings.steps
      stop = interrupt.requested
      if milestone or stop:
        bar.record(pending, state)
        pending = None
        if milestone:
          bar.probe(state)
        save(checkpoints, state, history, batches)
      if stop:
        break
  return state, history


def _progress(console: Console) -> Progress:
  return Progress(
    TextColumn("training"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[loss]}"),
    TextColumn("{task.fields[rate]}"),
    TimeRemainingColumn(),
    console=console,
  )


class _Bar:
  """Writes the history down, and shows its end."""

  def __init__(
    self,
    progress: Progress,
    settings: Settings,
    history: History,
    held_out: np.ndarray,
  ):
    self._held_out = held_out
    self._progress = progress
    self._settings = settings
    self._history = history
    self._clock = time.perf_counter()
    self._task = progress.add_task(
      "training",
      total=settings.steps,
      completed=len(history.losses),
      loss="compiling",
      rate="",
    )

  def record(self, loss: jax.Array, state: TrainState) -> None:
    value = float(jax.device_get(loss))
    if not math.isfinite(value):
      step = len(self._history.losses) + 1
      raise InputError(
        f"the loss became {value} at step {step}; {self._largest(state)}"
      )
    self._history.losses.append(value)
    seconds = self._lap()
    tokens = self._settings.batch_size * self._settings.window
    self._progress.update(
      self._task,
      advance=1,
      loss=f"{np.mean(self._history.losses[-20:]):.2f} bits/byte",
      rate=f"{tokens / seconds:,.0f} tokens/s",
    )

  def probe(self, state: TrainState) -> None:
    """Measures a small part of the held-out text."""
    part = evaluation.stretches(self._held_out, at_most=evaluation.ROWS)
    bits = evaluation.bits_per_byte(self._settings, state.params, part)
    step = len(self._history.losses)
    self._history.probes.append((step, bits))
    self._lap()
    self._progress.console.print(
      f"step {step:>5,}: {np.mean(self._history.losses[-20:]):.3f} in training,"
      f" {bits:.3f} on {part[:, 1:].size:,} held-out bytes;"
      f" {self._largest(state)}"
    )

  def _largest(self, state: TrainState) -> str:
    """The layer whose memory is the largest; nan counts as larger than all."""
    norms = evaluation.memory_norms(
      self._settings, state.params, self._held_out[: self._settings.window]
    )
    layer = max(norms, key=lambda i: np.nan_to_num(norms[i], nan=np.inf))
    return f"largest memory: layer {layer}, norm {norms[layer]:.3g}"

  def _lap(self) -> float:
    now = time.perf_counter()
    seconds = now - self._clock
    self._clock = now
    self._history.seconds += seconds
    return seconds
