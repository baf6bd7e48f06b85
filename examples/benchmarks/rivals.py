"""Makes environments with the rivals, apart from the one of this library.

  python -m examples.benchmarks.rivals
  python -m examples.benchmarks.rivals -- PIP_ARGUMENTS

They are folders in the root of the checkout, ignored by git. On Linux the
usual wheel of torch brings gigabytes of GPU libraries: what follows `--` goes
to pip, such as an index of CPU builds.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TORCH = ROOT / ".venv-rivals"
JAX = ROOT / ".venv-rivals-jax"
PACKAGES = {
  TORCH: (
    "torch==2.13.0",
    "memory-caching==0.1.0",
    "titans-pytorch==0.5.5",
    "numpy",
  ),
  JAX: ("jax-linear-attention==0.1.0",),
}
# jax-linear-attention needs a newer Python than this library.
JAX_PYTHON = (3, 12)


def interpreter(folder: Path) -> Path:
  """The Python of an environment, there or not."""
  if os.name == "nt":
    return folder / "Scripts" / "python.exe"
  return folder / "bin" / "python"


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("pip_arguments", nargs="*", help="passed on to pip")
  arguments = parser.parse_args()
  _install(TORCH, sys.executable, arguments.pip_arguments)
  newer = _newer_python()
  if newer is None:
    wanted = ".".join(map(str, JAX_PYTHON))
    print(f"{JAX.name}: left out, no Python {wanted} or newer was found")
  else:
    _install(JAX, newer, arguments.pip_arguments)


def _install(folder: Path, python: str, pip_arguments: list[str]) -> None:
  print(f"{folder.name}: installing {', '.join(PACKAGES[folder])}", flush=True)
  subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
  pip = [str(interpreter(folder)), "-m", "pip"]
  install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
  subprocess.run([*install, *PACKAGES[folder], *pip_arguments], check=True)
  freeze = [*pip, "list", "--format=freeze", "--disable-pip-version-check"]
  listing = subprocess.run(freeze, check=True, capture_output=True, text=True)
  print(f"{folder.name}: {', '.join(listing.stdout.split())}", flush=True)


def _newer_python() -> str | None:
  """One that runs and makes environments: a shim on the PATH may do neither."""
  candidates = [sys.executable]
  for minor in (12, 13, 14):
    candidates.append(shutil.which(f"python3.{minor}") or "")
  versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
  candidates += sorted(map(str, versions.glob("versions/3.1[2-9]*/bin/python")))
  check = (
    f"import ensurepip, sys, venv; sys.exit(sys.version_info < {JAX_PYTHON})"
  )
  for candidate in filter(None, candidates):
    result = subprocess.run([candidate, "-c", check], capture_output=True)
    if result.returncode == 0:
      return candidate
  return None


if __name__ == "__main__":
  main()
