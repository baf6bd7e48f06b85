"""Puts measured tables into the README, between two comments."""

from pathlib import Path

README = Path(__file__).with_name("README.md")


def replace(part: str, text: str, path: Path = README) -> None:
  """Replaces what stands between ``<!-- part -->`` and ``<!-- /part -->``."""
  first, last = f"<!-- {part} -->\n", f"<!-- /{part} -->\n"
  old = path.read_text()
  if old.count(first) != 1 or old.count(last) != 1:
    raise ValueError(f"`path` must have {first!r} and {last!r} once: {path}.")
  before, rest = old.split(first)
  after = rest.split(last)[1]
  path.write_text(f"{before}{first}\n{text}\n\n{last}{after}")
