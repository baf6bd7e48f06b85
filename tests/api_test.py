"""What is public exists and is documented, and documented code runs."""

import doctest
import importlib
import inspect
import pathlib
import re
import types
from collections.abc import Iterator

import pytest

from tests.imports_test import MODULES

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = [m for m, path in MODULES.items() if path.name == "__init__.py"]
WITH_EXAMPLES = [m for m, path in MODULES.items() if ">>>" in path.read_text()]

INSTALL = 'pip install -e ".[test]"'
TEST = "pytest -n auto"


def sort_key(name: str) -> tuple[int, str]:
  """Constants, then classes, then the rest: ruff's order of ``__all__``."""
  return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def own_docstring(thing: object) -> str:
  """The docstring someone wrote, not one that Python made or inherited."""
  if not inspect.isclass(thing):
    return thing.__doc__ or ""
  text = vars(thing).get("__doc__") or ""
  # Dataclasses and NamedTuples without one get their signature.
  return "" if text.startswith(f"{thing.__name__}(") else text


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_in_order_with_docstrings(package: str):
  module = importlib.import_module(package)
  assert module.__doc__, f"{package} has no docstring."
  assert hasattr(module, "__all__"), f"{package} has no __all__."
  assert list(module.__all__) == sorted(module.__all__, key=sort_key)
  for name in module.__all__:
    thing = getattr(module, name)
    if callable(thing) or isinstance(thing, types.ModuleType):
      assert own_docstring(thing).strip(), f"{package}.{name}: no docstring."


def doctests(module: types.ModuleType) -> Iterator[doctest.DocTest]:
  """The examples of a module, also those of functions inside a transform."""
  yield from doctest.DocTestFinder(exclude_empty=True).find(module)
  parser = doctest.DocTestParser()
  for name, thing in vars(module).items():
    # doctest overlooks what jax.jit and jax.custom_vjp return.
    if inspect.isroutine(thing) or not hasattr(thing, "__wrapped__"):
      continue
    if getattr(thing, "__module__", None) == module.__name__:
      full_name = f"{module.__name__}.{name}"
      found = parser.get_doctest(
        thing.__doc__ or "", vars(module), full_name, module.__file__, None
      )
      if found.examples:
        yield found


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_run(name: str):
  module = importlib.import_module(name)
  report = []
  runner = doctest.DocTestRunner(
    optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
  )
  for found in doctests(module):
    runner.run(found, out=report.append)
  assert runner.tries, f"{name} has a >>> that doctest does not find."
  assert not runner.failures, "".join(report)


def blocks(language: str) -> list[str]:
  """The fenced code blocks of one language in the README."""
  readme = (ROOT / "README.md").read_text()
  return re.findall(rf"^```{language}\n(.*?)^```$", readme, re.M | re.S)


def test_readme_code_runs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  sources = blocks("python")
  assert sources
  namespace = {"__name__": "readme"}
  for number, source in enumerate(sources):
    exec(compile(source, f"README.md, block {number}", "exec"), namespace)


def test_ci_installs_and_tests_as_the_readme_says():
  readme = [
    command.strip()
    for block in blocks("console")
    for line in block.splitlines()
    for command in line.removeprefix("$ ").split("&&")
  ]
  script = (ROOT / ".ci" / "run").read_text().splitlines()
  for command in (INSTALL, TEST):
    assert command in readme
    assert command in [line.strip() for line in script]
