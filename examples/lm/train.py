"""A run: set up, go on from the newest checkpoint, train, measure, save."""

import math
import pathlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils
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
from examples.lm import (
  data,
  export,
  sharding,
  tokenizers,
  training,
  utilization,
)
from examples.lm.metrics import Log, parameter_table
from examples.lm.packing import Batch
from examples.lm.profiling import Profile
from examples.lm.settings import Settings
from examples.train_state import TrainState
from examples.workdir import claim


class TrainingError(Exception):
  """A run that cannot go on."""


@dataclass(frozen=True)
class Result:
  """How a run ended.

  Attributes:
    step: the last one done; below `steps` when it was interrupted.
    state: after it.
    held_out_loss: nats per token; None when it was interrupted.
  """

  step: int
  state: TrainState
  held_out_loss: float | None


def run(
  settings: Settings,
  workdir: pathlib.Path,
  console: Console,
  interrupt: Interrupt | None = None,
) -> Result:
  """Trains to the last step and measures; every process calls it.

  Raises:
    InputError: for what the user can put right.
    TrainingError: when the loss is not finite.
  """
  first = jax.process_index() == 0
  say = console.print if first else lambda *_: None
  mesh = sharding.make_mesh(settings.mesh)
  shardings = sharding.layout(settings, mesh)
  session = _Session(settings, workdir, shardings, say)
  # Nothing is left in the folder by settings that are wrong by themselves.
  if first:
    claim(workdir, settings.identity())
  _meet("claimed")
  with jax.set_mesh(mesh), closing(session):
    state = session.begin()
    say(parameter_table(state))
    if utilization.peak(jax.devices()) is None:
      kind = jax.devices()[0].device_kind
      say(f"utilization is not logged: nobody wrote down the peak of {kind}")
    with _progress(console, first) as update:
      state = session.train(state, update, interrupt)
    step = int(state.step)
    held_out = None
    if step == settings.steps:
      held_out = session.measure(state)
      say(f"held out: {held_out:.4f} nats a token")
      export.save(workdir / "model", settings, state.params)
  return Result(step, state, held_out)


def _meet(name: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


@contextmanager
def _progress(console: Console, shown: bool) -> Iterator[Callable]:
  """A bar on a terminal; gives a function that moves it."""
  bar = Progress(
    TextColumn("training"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[loss]}"),
    TimeRemainingColumn(),
    console=console,
    disable=not (shown and console.is_terminal),
  )
  with bar:
    task = bar.add_task("training", total=None, loss="compiling")
    yield lambda **fields: bar.update(task, **fields)


class _Session:
  """What a run holds besides its state."""

  def __init__(self, settings, workdir, shardings, say):
    self._settings, self._workdir = settings, workdir
    self._shardings, self._say = shardings, say
    self._rows = sharding.local_rows(shardings.batch, settings.batch_size)
    tokenizer = tokenizers.load(settings.data.tokenizer)
    train, held_out = data.documents(settings.data)
    say(f"{len(train):,} documents to train on, {len(held_out):,} held out")
    make = lambda source, endless: data.Batches(
      source, tokenizer, settings, self._rows, endless=endless
    )
    self._batches = data.iterator(make(train, True), settings.prefetch)
    self._held_out = make(held_out, False)
    self._step, self._measure = training.compiled(settings, shardings)
    self._profile = Profile(workdir, settings.profile_steps)
    self._checkpoints: Checkpoints | None = None
    self._log: Log | None = None

  def begin(self) -> TrainState:
    """The state of the newest checkpoint, or a fresh one."""
    settings, shardings = self._settings, self._shardings
    self._checkpoints = Checkpoints(
      self._workdir, self._say, keep=settings.keep, background=True
    )
    like = sharding.on_mesh(sharding.abstract_state(settings), shardings.state)
    restored = self._checkpoints.restore(like)
    if restored is None:
      self._say("starting at step 0")
      self._log = Log(self._workdir, 0)
      return sharding.initial_state(settings, shardings)
    state, notes = restored
    step = int(state.step)
    places = [notes["places"][row] for row in self._rows]
    self._batches.set_state({"places": places})
    self._say(f"going on after step {step:,}")
    self._log = Log(self._workdir, step)
    return state

  def train(self, state, update, interrupt) -> TrainState:
    """Steps until the last one, or until an interrupt is noticed."""
    settings = self._settings
    step = int(state.step)
    update(total=settings.steps, completed=step)
    first = step
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    recorder = _Recorder(
      *(self._settings, parameters, self._log, self._workdir, update)
    )
    while step < settings.steps:
      step += 1
      self._profile.before(step - first, state)
      batch = next(self._batches)
      on_devices = self._spread(batch)
      with jax.transfer_guard("disallow"):
        state, metrics = self._step(state, on_devices)
      # While the devices compute this step, read what the last one left.
      recorder.add(step, metrics, batch)
      stop = interrupt is not None and interrupt.requested
      if stop or step % settings.save_every == 0 or step == settings.steps:
        recorder.flush()  # a state that is not finite is never saved
        self._save(step, state)
      self._checkpoints.check()
      every = settings.evaluate_every
      if every and step % every == 0 and step < settings.steps:
        recorder.flush()
        self.measure(state)
        recorder.restart_clock()
      if stop:
        break
    recorder.flush()
    return state

  def measure(self, state) -> float:
    """Nats per token of the held-out rows."""
    settings = self._settings
    batches = iter(self._held_out)
    empty = Batch.empty(len(self._rows), settings.length)
    nats, tokens, watched = 0.0, 0.0, {}
    for number in range(settings.evaluation_batches):
      # All processes take part, whether they have rows left or not.
      batch = self._spread(next(batches, empty))
      with jax.transfer_guard("disallow"):
        sums = self._measure(state.params, batch)
        if number == 0 and settings.watch_tokens:
          watch = training.compiled_watch(settings, self._shardings)
          watched = watch(state.params, batch)
      loss, count = jax.device_get(sums)
      nats, tokens = nats + float(loss), tokens + float(count)
    loss = nats / max(tokens, 1.0)
    scalars = {"held_out_loss": loss, **jax.device_get(watched)}
    scalars = {name: float(value) for name, value in scalars.items()}
    self._log.write(int(state.step), scalars)
    return loss

  def _spread(self, batch: Batch) -> Batch:
    return sharding.global_batch(
      batch, self._rows, self._settings.batch_size, self._shardings.batch
    )

  def _save(self, step: int, state: TrainState) -> None:
    places = np.full((self._settings.batch_size, 3), -1, np.int32)
    places[self._rows] = self._batches.get_state()["places"]
    if jax.process_count() > 1:
      places = multihost_utils.process_allgather(places).max(axis=0)
    self._checkpoints.save(step, state, {"places": places.tolist()})

  def close(self) -> None:
    """Ends what runs beside the steps; raises if a save failed."""
    self._batches.close()
    self._profile.close()
    if self._log is not None:
      self._log.close()
    if self._checkpoints is not None:
      self._checkpoints.close()


class _Recorder:
  """Reads metrics one step late, checks and logs them."""

  def __init__(self, settings, parameters, log, workdir, update):
    self._settings, self._parameters, self._log = settings, parameters, log
    self._peak = utilization.peak(jax.devices())
    self._workdir, self._update = workdir, update
    self._pending = None
    self._tokens = 0.0
    self.restart_clock()

  def restart_clock(self) -> None:
    self._clock, self._tokens = time.perf_counter(), 0.0

  def add(self, step: int, metrics, batch: Batch) -> None:
    self.flush()
    self._pending = step, metrics, batch

  def flush(self) -> None:
    """Looks at the step that was added last."""
    if self._pending is None:
      return
    step, metrics, batch = self._pending
    self._pending = None
    scalars = {
      name: float(value)
      for name, value in vars(jax.device_get(metrics)).items()
    }
    if not all(map(math.isfinite, scalars.values())):
      raise TrainingError(self._keep(step, scalars, batch))
    self._tokens += scalars.pop("tokens")
    self._update(completed=step, loss=f"{scalars['loss']:.3f}")
    if step % self._settings.log_every == 0 or step == self._settings.steps:
      seconds = time.perf_counter() - self._clock
      scalars["tokens_per_second"] = self._tokens / seconds
      if self._peak is not None:
        done = utilization.model_flops(self._parameters, self._tokens)
        scalars["utilization"] = done / seconds / self._peak
      self._log.write(step, scalars)
      self.restart_clock()

  def _keep(self, step, scalars, batch) -> str:
    """Saves the rows of this process; returns what to say."""
    path = self._workdir / f"step_{step}_rows_of_{jax.process_index()}.npz"
    np.savez(path, **vars(batch))
    values = ", ".join(f"{name} {value}" for name, value in scalars.items())
    return f"step {step} is not finite: {values}; its batch is in {path}"
