"""Everything a run needs to go on, in one orbax checkpoint per saved step."""

import json
import pathlib
from dataclasses import asdict, dataclass, field

import grain
import jax
import orbax.checkpoint as ocp

from examples.quickstart.settings import InputError, Settings
from examples.quickstart.training import TrainState

SETTINGS = "settings.json"
FOLDER = "checkpoints"
DAMAGED = "damaged"


@dataclass
class History:
  """What the loss curve shows; saved with the state it led to.

  Attributes:
    losses: of every step, bits per byte.
    probes: pairs of a step and the held-out bits per byte after it.
    seconds: spent training, over all sessions.
  """

  losses: list[float] = field(default_factory=list)
  probes: list[tuple[int, float]] = field(default_factory=list)
  seconds: float = 0.0


def claim(workdir: pathlib.Path, settings: Settings) -> None:
  """Makes the folder of this run, or recognises it.

  Raises:
    InputError: when the folder holds another run, or anything else.
  """
  path = workdir / SETTINGS
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if path.exists():
      saved = json.loads(path.read_text())
    elif any(workdir.iterdir()):
      raise InputError(
        f"{workdir} is not empty and holds no run: choose another --workdir"
      )
    else:
      path.write_text(json.dumps(asdict(settings), indent=2) + "\n")
      return
  except OSError as error:
    raise InputError(f"cannot use {workdir}: {error.strerror}") from None
  except ValueError:
    raise InputError(f"{path} is damaged: choose another --workdir") from None
  differences = settings.differences(saved)
  if differences:
    raise InputError(
      f"{workdir} holds a run of other settings, {differences}: "
      "choose another --workdir"
    )


class Checkpoints:
  """The saved steps of a run, newest last.

  A step counts only once it is complete: orbax writes it under another name
  and renames it at the end. One that is complete and cannot be read all the
  same is moved aside, never deleted.
  """

  def __init__(self, workdir: pathlib.Path, say=print):
    self._workdir = workdir.absolute()
    self._say = say
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
      max_to_keep=2,
      # The state is small; what was saved is safe when `save` returns.
      enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager(self._workdir / FOLDER, options=options)

  def save(
    self,
    state: TrainState,
    history: History,
    batches: grain.DatasetIterator,
  ) -> None:
    """Saves the state after a step, with the place in the data."""
    step = int(state.step)
    if step == self._manager.latest_step():
      return
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        history=ocp.args.JsonSave(asdict(history)),
        batches=grain.checkpoint.CheckpointSave(batches),
      ),
    )

  def restore(
    self, like: TrainState, batches: grain.DatasetIterator
  ) -> tuple[TrainState, History] | None:
    """Loads the newest step that can be read, and moves `batches` there."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    while (step := self._manager.latest_step()) is not None:
      try:
        restored = self._manager.restore(
          step,
          args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract),
            history=ocp.args.JsonRestore(),
            batches=grain.checkpoint.CheckpointRestore(batches),
          ),
        )
        return restored["state"], History(**restored["history"])
      except Exception as error:  # orbax raises what its many layers raise
        self._put_aside(step, error)
    return None

  def _put_aside(self, step: int, error: Exception) -> None:
    old = self._workdir / FOLDER / str(step)
    new = self._workdir / DAMAGED / str(step)
    reason = str(error).splitlines()[0] if str(error) else repr(error)
    self._say(f"checkpoint {step} cannot be read, moved to {new}: {reason}")
    self._manager.close()
    new.parent.mkdir(exist_ok=True)
    old.rename(new)
    self._manager = self._open()

  def close(self) -> None:
    self._manager.close()
