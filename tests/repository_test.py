"""Rules that hold for every text file of the repository."""

import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]

SUFFIXES = {".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
NAMED = {".gitignore", "LICENSE", "run"}
# No part of the repository: caches, builds, what examples write.
SKIPPED = {"__pycache__", "build", "checkpoints", "dist", "runs"}
HIDDEN = {".ci", ".github"}

# Each pattern is written so that it does not match itself.
FORBIDDEN = {
  "a path of one machine": r"(?<![\w.])/(home|opt|root|tmp|work|Users)/\w",
  "a host of a package registry": r"(pypi|npmjs|debian|pythonhoste[d])\.org",
  "an unfinished part": r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b|implemented ye[t]",
  "a swallowed import error": r"except ImportErro[r]:\s*pass",
  "a skipped test": r"pytest\.skip\(|mark\.(skip|xfai[l])",
}
MAX_LINES = {"memcache_jax": 300, "pallas_kernels": 600, "CONTRIBUTING.md": 120}
VAGUE_NAMES = {"common.py", "helpers.py", "misc.py", "utils.py"}


def is_part(folder: str, name: str) -> bool:
  """Whether a folder inside ``folder`` belongs to the repository."""
  if name in SKIPPED or name.endswith(".egg-info"):
    return False
  if name.startswith(".") and name not in HIDDEN:
    return False
  return not (pathlib.Path(folder) / name / "pyvenv.cfg").exists()


def text_files() -> list[str]:
  files = []
  for folder, folders, names in os.walk(ROOT):
    folders[:] = [name for name in folders if is_part(folder, name)]
    files += [
      (pathlib.Path(folder) / name).relative_to(ROOT).as_posix()
      for name in names
      if name in NAMED or pathlib.Path(name).suffix in SUFFIXES
    ]
  return sorted(files)


FILES = text_files()


def test_there_is_something_to_check():
  wanted = {".ci/run", ".github/workflows/ci.yml", "LICENSE", "pyproject.toml"}
  assert wanted < set(FILES)
  assert any(name.startswith("memcache_jax/") for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_white_space(name: str):
  text = (ROOT / name).read_text()
  assert "\r" not in text
  assert "\t" not in text
  trailing = [
    number
    for number, line in enumerate(text.split("\n"), start=1)
    if line != line.rstrip()
  ]
  assert not trailing, f"{name}: trailing white space in lines {trailing}."
  assert not text or text.endswith("\n")
  assert not text.endswith("\n\n")


@pytest.mark.parametrize("name", FILES)
def test_nothing_forbidden(name: str):
  text = (ROOT / name).read_text()
  found = [
    f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match[0]}"
    for what, pattern in FORBIDDEN.items()
    for match in re.finditer(pattern, text)
  ]
  assert not found, "\n".join(found)


@pytest.mark.parametrize("name", FILES)
def test_files_are_short(name: str):
  limit = MAX_LINES.get(name.split("/")[0])
  lines = len((ROOT / name).read_text().splitlines())
  assert limit is None or name.endswith("README.md") or lines <= limit


def test_names_of_modules_say_something():
  paths = [pathlib.Path(name) for name in FILES]
  vague = [path for path in paths if path.name in VAGUE_NAMES]
  assert not vague


def test_the_ci_script_can_be_executed():
  assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
