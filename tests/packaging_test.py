"""The wheel holds memcache_jax, its kernels, and nothing else."""

import email
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = {"memcache_jax": ROOT / "memcache_jax"}
FOLDERS["memcache_jax/pallas_kernels"] = ROOT / "pallas_kernels"


def version() -> str:
  namespace = {}
  exec((ROOT / "memcache_jax" / "version.py").read_text(), namespace)
  return namespace["__version__"]


def installed_as(pattern: str) -> dict[str, pathlib.Path]:
  """The library's files that match, by their place in an installation."""
  return {
    f"{place}/{path.relative_to(folder).as_posix()}": path
    for place, folder in FOLDERS.items()
    for path in folder.rglob(pattern)
  }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """A wheel of a copy of the checkout, built without network."""
  source = tmp_path_factory.mktemp("source")
  for name in ("LICENSE", "README.md", "pyproject.toml"):
    shutil.copy(ROOT / name, source)
  # The last three must stay out of the wheel.
  folders = ("memcache_jax", "pallas_kernels", "configs", "examples", "tests")
  for name in folders:
    shutil.copytree(
      ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
    )
  out = tmp_path_factory.mktemp("wheel")
  build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
  result = subprocess.run(
    [*build, "--outdir", str(out), str(source)], capture_output=True, text=True
  )
  assert result.returncode == 0, result.stdout + result.stderr
  (path,) = out.iterdir()
  with zipfile.ZipFile(path) as archive:
    yield archive


def test_packages_are_complete():
  config = tomllib.loads((ROOT / "pyproject.toml").read_text())
  listed = config["tool"]["setuptools"]["packages"]
  on_disk = {
    str(pathlib.PurePosixPath(place).parent).replace("/", ".")
    for place in installed_as("__init__.py")
  }
  assert set(listed) == on_disk
  assert listed == sorted(listed)


def test_only_memcache_jax_is_at_the_top(wheel):
  top = {name.split("/")[0] for name in wheel.namelist()}
  assert top == {"memcache_jax", f"memcache_jax-{version()}.dist-info"}


def test_the_wheel_holds_every_module_and_no_other(wheel):
  in_wheel = {name for name in wheel.namelist() if name.endswith(".py")}
  assert in_wheel == set(installed_as("*.py"))
  assert "memcache_jax/pallas_kernels/__init__.py" in in_wheel
  assert "memcache_jax/py.typed" in wheel.namelist()
  tasks = {name for name in wheel.namelist() if name.endswith(".yaml")}
  assert tasks == set(installed_as("*.yaml"))
  assert "memcache_jax/evaluation/tasks/based_drop.yaml" in tasks


def test_metadata(wheel):
  info = f"memcache_jax-{version()}.dist-info"
  metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
  assert metadata["Name"] == "memcache-jax"
  assert metadata["Version"] == version()
  assert metadata["License-Expression"] == "Apache-2.0"
  licence = (ROOT / "LICENSE").read_bytes()
  assert wheel.read(f"{info}/licenses/LICENSE") == licence
