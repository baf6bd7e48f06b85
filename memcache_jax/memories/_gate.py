"""Sizes of a memory's heads, and the gates it asks a layer for."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class HeadShape(NamedTuple):
  """Sizes of the heads of a memory, known before anything is traced."""

  num_heads: int
  key_dim: int
  value_dim: int


@dataclass(frozen=True)
class Gate:
  """How a layer should make one gate of a memory from its input.

  Attributes:
    kind: what the gate is in natural form. "log_decay": logarithm of a decay
      in (0, 1), Mamba-2's parameterisation. "dt": the time step of that same
      decay, a write strength. "sigmoid": between 0 and scale. "linear": any
      number. "connector": the router query, as wide as a key. "direction": a
      unit vector, as wide as a key.
    width: numbers per token and head; None for one without an axis of its
      own, "key" for as many as a key has. "connector" and "direction" always
      are that wide.
    bias: bias of the projection at the start, one for all or one per number.
    scale: factor on a sigmoid, and on the rate of a "log_decay" at the start.
  """

  kind: Literal[
    "log_decay", "dt", "sigmoid", "linear", "connector", "direction"
  ]
  width: int | Literal["key"] | None = None
  bias: float | tuple[float, ...] = 0.0
  scale: float = 1.0

  def axes(self, key_dim: int) -> tuple[int, ...]:
    """Sizes of the axes after the heads."""
    if self.width == "key" or self.kind in ("connector", "direction"):
      return (key_dim,)
    return () if self.width is None else (self.width,)
