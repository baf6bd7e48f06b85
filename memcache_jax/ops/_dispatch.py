"""Which implementation of an op runs."""

from typing import Literal, TypeAlias

Implementation: TypeAlias = Literal["reference", "xla", "mosaic_tpu", "triton"]

_NAMES = ("reference", "xla", "mosaic_tpu", "triton")


def resolve(op: str, implementation: str | None) -> Literal["reference", "xla"]:
  """Turns the public `implementation` argument into the one to run.

  ``None`` takes the fastest one there is for the op. An explicit choice never
  falls back to another.

  Raises:
    ValueError: for a name that does not exist.
    NotImplementedError: for one that this op does not have.
  """
  match implementation:
    case None | "xla":
      return "xla"
    case "reference":
      return "reference"
    case "mosaic_tpu" | "triton":
      raise NotImplementedError(
        f"{op} has no {implementation!r} kernel: use implementation='xla', "
        "which runs on every platform, or None."
      )
    case _:
      raise ValueError(
        f"`implementation` must be None or one of {_NAMES}: "
        f"got {implementation!r}."
      )
