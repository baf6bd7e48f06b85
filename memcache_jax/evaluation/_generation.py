"""What a task asks of generated text, and what of a prompt is read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Options of `generate_until` that are understood.
_KNOWN = {
  *("until", "max_gen_toks"),
  *("do_sample", "temperature", "top_k", "top_p"),
}


class Options(NamedTuple):
  """How to continue a prompt."""

  until: tuple[str, ...]
  max_new_tokens: int
  temperature: float
  top_k: int | None
  top_p: float | None


def options(given: Mapping[str, Any], max_new_tokens: int) -> Options:
  """What a task asks for.

  Args:
    given: its `generation_kwargs`.
    max_new_tokens: where it does not say.

  Raises:
    ValueError: for an option that would be ignored.
  """
  if unknown := set(given) - _KNOWN:
    raise ValueError(
      f"`gen_kwargs` may have {sorted(_KNOWN)}: got {sorted(unknown)}."
    )
  # None is as good as not given.
  given = {name: x for name, x in given.items() if x is not None}
  until = given.get("until", ())
  until = (until,) if isinstance(until, str) else tuple(until)
  temperature = float(given.get("temperature", 1.0))
  if not given.get("do_sample", "temperature" in given):
    temperature = 0.0
  return Options(
    tuple(stop for stop in until if stop),
    given.get("max_gen_toks", max_new_tokens),
    temperature,
    given.get("top_k") or None,  # 0: all
    given.get("top_p"),
  )


def before_stop(text: str, until: Iterable[str]) -> tuple[str, bool]:
  """The text before the first stop string, and whether there is one."""
  ends = [place for stop in until if (place := text.find(stop)) >= 0]
  return (text[: min(ends)], True) if ends else (text, False)


def without_middle(tokens: Sequence[int], longest: int | None) -> list[int]:
  """A prompt, or what LongBench leaves of it if it is too long.

  The first and the last half of the length, rounded down (Bai et al., arXiv
  2308.14508, and its code, github.com/THUDM/LongBench, which joins the halves
  as text; here they are joined as tokens).

  Args:
    tokens: ids of the prompt.
    longest: tokens that a prompt may have; None for any number.
  """
  if longest is None or len(tokens) <= longest:
    return list(tokens)
  half = longest // 2
  return [*tokens[:half], *tokens[-half:]]
