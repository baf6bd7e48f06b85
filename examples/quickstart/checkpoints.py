"""What a run remembers: the history beside the state and the place in the data.

See `examples.checkpoints` for how it is written.
"""

from dataclasses import asdict, dataclass, field

import grain

from examples.checkpoints import Checkpoints
from examples.train_state import TrainState


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


def save(
  checkpoints: Checkpoints,
  state: TrainState,
  history: History,
  batches: grain.DatasetIterator,
) -> None:
  """Saves the state after a step, with the place in the data."""
  notes = {"history": asdict(history), "batches": batches.get_state()}
  checkpoints.save(int(state.step), state, notes)


def restore(
  checkpoints: Checkpoints, like: TrainState, batches: grain.DatasetIterator
) -> tuple[TrainState, History] | None:
  """Loads the newest step that can be read, and moves `batches` there."""
  restored = checkpoints.restore(like)
  if restored is None:
    return None
  state, notes = restored
  batches.set_state(notes["batches"])
  return state, History(**notes["history"])
