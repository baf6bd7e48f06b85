"""Imports go one way: the table below, checked on the source."""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]

LEAVES = {
  "array_typing",
  "numerics",
  "sharding",
  "token_layout",
  "version",
}
KERNELS = "pallas_kernels"

# What each part of memcache_jax may import of it, besides itself and leaves.
OURS = {
  **{leaf: set() for leaf in LEAVES},
  KERNELS: set(),
  "ops": set(),
  "memories": {"ops"},
  "caching": {"ops", "memories"},
  "layers": {"ops", "memories", "caching"},
  "models": {"ops", "memories", "caching", "layers"},
  "decoding": {"ops", "memories", "caching", "layers", "models"},
  "tasks": set(),
  # Nothing imports it: it needs a package that few have.
  "evaluation": {"ops", "models", "decoding", "tasks"},
  # For tests only: nothing in the package imports it.
  "testing": {"memories"},
  "__init__": {
    *("ops", "memories", "caching", "layers", "models", "decoding", "tasks"),
  },
}
# These two stand alone: not even leaves.
NO_LEAVES = {KERNELS, "tasks"}

# What each part may import of others; the standard library is free to all.
CORE = {"einops", "jax", "jaxtyping", "numpy"}
THEIRS = {
  **{leaf: CORE for leaf in LEAVES},
  "testing": CORE | {"chex"},
  KERNELS: {"jax"},
  "ops": CORE,
  "memories": CORE,
  "caching": CORE,
  "layers": CORE | {"flax"},
  "models": CORE | {"flax"},
  "decoding": CORE | {"flax"},
  "tasks": {"numpy"},
  "evaluation": CORE | {"flax", "lm_eval"},
  "__init__": set(),
}
# The one memory that is made of flax modules; the others run without flax.
THEIRS_IN = {"memcache_jax.memories._cell": {"flax"}}


class Import(NamedTuple):
  """One imported name, dotted, and whether it waits inside a function."""

  name: str
  lazy: bool
  line: int


def part_of(module: str) -> str:
  """The part that ``memcache_jax.part.rest`` belongs to."""
  return (module.split(".") + ["__init__"])[1]


def modules() -> dict[str, pathlib.Path]:
  """Every module that is installed, by the name it is imported as."""
  found = {}
  for folder, package in [
    ("memcache_jax", "memcache_jax"),
    (KERNELS, f"memcache_jax.{KERNELS}"),
  ]:
    for path in sorted((ROOT / folder).rglob("*.py")):
      inside = path.relative_to(ROOT / folder).with_suffix("").parts
      parts = [p for p in inside if p != "__init__"]
      found[".".join([package, *parts])] = path
  return found


MODULES = modules()


def imports(module: str, path: pathlib.Path) -> Iterator[Import]:
  package = module.split(".")
  if path.name != "__init__.py":
    package = package[:-1]
  tree = ast.parse(path.read_text(), filename=str(path))
  lazy_nodes = {
    id(node)
    for function in ast.walk(tree)
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    for node in ast.walk(function)
  }
  for node in ast.walk(tree):
    for name in imported_names(node, package):
      yield Import(name, id(node) in lazy_nodes, getattr(node, "lineno", 0))


def imported_names(node: ast.AST, package: list[str]) -> list[str]:
  match node:
    case ast.Import(names=names):
      return [alias.name for alias in names]
    case ast.ImportFrom(module=base, names=names, level=level):
      above = package[: len(package) + 1 - level] if level else []
      prefix = above + ([base] if base else [])
      return [".".join([*prefix, alias.name]) for alias in names]
    case ast.Call(func=ast.Attribute(attr="import_module"), args=[name, *_]):
      return [literal_start(name)]
  return []


def literal_start(node: ast.expr) -> str:
  """The text that a string or f-string begins with."""
  match node:
    case ast.Constant(value=str(text)):
      return text
    case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
      return text
  raise AssertionError(
    f"line {node.lineno}: import_module needs a name that begins literally."
  )


def complaint(module: str, found: Import) -> str | None:
  """Why ``module`` must not contain this import."""
  part = part_of(module)
  top = found.name.split(".")[0]
  if top == "memcache_jax":
    return complain_of_ours(part, found)
  if found.name == "__future__.annotations":
    return "switches the checks of jaxtyping off"
  if top in sys.stdlib_module_names:
    return None
  if found.name.startswith("flax.linen"):
    return "NNX only"
  if top in THEIRS[part] | THEIRS_IN.get(module, set()):
    return None
  return f"{part} may import only {sorted(THEIRS[part])}"


def complain_of_ours(importer: str, found: Import) -> str | None:
  imported = part_of(found.name)
  if imported not in OURS:
    # A name defined in memcache_jax/__init__.py, which imports everything.
    return "import the part that defines it"
  if imported == importer and importer != "__init__":
    return None
  if imported == KERNELS:
    if importer == "ops" and found.lazy:
      return None
    return "kernels are imported only by ops, inside a function"
  if imported in LEAVES:
    return f"{importer} stands alone" if importer in NO_LEAVES else None
  if imported not in OURS[importer]:
    return f"{importer} may import only {sorted(OURS[importer])} and leaves"
  if importer == "caching" and imported == "memories":
    if not found.name.startswith("memcache_jax.memories._base"):
      return "caching knows the protocol in memories._base, no memory"
  return None


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module: str):
  assert part_of(module) in OURS, f"{module}: give its part a row in the table."
  path = MODULES[module]
  faults = [
    f"{path.relative_to(ROOT)}:{found.line}: {found.name}: {why}"
    for found in imports(module, path)
    if (why := complaint(module, found))
  ]
  assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
  ("module", "source", "allowed"),
  [
    ("memcache_jax.ops.x", "from memcache_jax import numerics", True),
    ("memcache_jax.ops.x", "from memcache_jax.memories import Linear", False),
    ("memcache_jax.ops.x", "import memcache_jax.pallas_kernels.y", False),
    ("memcache_jax.ops.x", "def f():\n  import memcache_jax.pallas_kernels", 1),
    ("memcache_jax.ops.x", "import optax", False),
    ("memcache_jax.ops.x", "from flax import nnx", False),
    ("memcache_jax.ops.x", "from __future__ import annotations", False),
    ("memcache_jax.caching.x", "from memcache_jax.memories import _base", True),
    ("memcache_jax.caching.x", "from memcache_jax.memories._base import A", 1),
    ("memcache_jax.caching.x", "from memcache_jax.memories import Linear", 0),
    ("memcache_jax.caching.x", "from ..memories import Linear", False),
    ("memcache_jax.caching.x", "from . import _gates", True),
    ("memcache_jax.layers.x", "from flax import nnx", True),
    ("memcache_jax.memories.x", "from flax import nnx", False),
    ("memcache_jax.memories._cell", "from flax import nnx", True),
    ("memcache_jax.layers.x", "from flax import linen", False),
    ("memcache_jax.layers.x", "from memcache_jax.models import A", False),
    ("memcache_jax.models.x", "from memcache_jax import Linear", False),
    ("memcache_jax.tasks.x", "import lm_eval", False),
    ("memcache_jax.evaluation", "import lm_eval", True),
    ("memcache_jax.decoding.x", "from memcache_jax import evaluation", False),
    ("memcache_jax.tasks.x", "from memcache_jax import numerics", False),
    ("memcache_jax.pallas_kernels.a.x", "from ..common import tiles", True),
    ("memcache_jax.pallas_kernels.a.x", "import numpy", False),
    ("memcache_jax.pallas_kernels.a.x", "import pallas_kernels", False),
    (
      "memcache_jax.ops.x",
      "import importlib as i\ni.import_module(f'memcache_jax.layers.{x}')",
      False,
    ),
  ],
)
def test_the_check_can_tell(module, source, allowed, tmp_path):
  path = tmp_path / "x.py"
  path.write_text(source)
  faults = [complaint(module, found) for found in imports(module, path)]
  assert faults
  assert not any(faults) == bool(allowed), faults


def test_the_library_never_imports_what_is_not_installed():
  for module, path in MODULES.items():
    tops = {found.name.split(".")[0] for found in imports(module, path)}
    assert not tops & {"configs", "examples", "tests"}, module


def test_import_starts_no_backend_and_loads_no_kernel():
  code = """
import sys
import memcache_jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
unwanted = {
  "memcache_jax.pallas_kernels", "pallas_kernels", "jax.experimental.pallas",
  "chex", "grain", "lm_eval", "ml_collections", "orbax.checkpoint",
}
assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
print("fine", memcache_jax.__version__)
"""
  result = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith("fine")
