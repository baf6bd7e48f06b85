"""The embedded country profiles, as documents to extract values from."""

import lzma
import pathlib

EMBEDDED = pathlib.Path(__file__).parent / "profiles.txt.xz"
SEPARATOR = "\n\n"


def profiles() -> tuple[str, ...]:
  """One text of lines `Attribute: value` for each country or region."""
  text = lzma.decompress(EMBEDDED.read_bytes()).decode()
  return tuple(text.split(SEPARATOR))
