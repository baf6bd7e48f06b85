"""Imports all of an installed wheel: `python check_wheel.py WHEEL CHECKOUT`."""

import importlib
import pathlib
import pkgutil
import sys
import zipfile

wheel, checkout = map(pathlib.Path, sys.argv[1:])

names = zipfile.ZipFile(wheel).namelist()
top = {name.split("/")[0] for name in names}
info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
assert top == {"memcache_jax", info}, f"top level of the wheel: {top}"

package = importlib.import_module("memcache_jax")
assert checkout.resolve() not in pathlib.Path(package.__file__).parents


# Needs an extra, which a clean environment does not have.
EXTRA = "memcache_jax.evaluation"


def fail(name: str):
  if name != EXTRA:
    raise ImportError(f"cannot import {name}")


imported = [
  module.name
  for module in pkgutil.walk_packages(
    package.__path__, "memcache_jax.", onerror=fail
  )
  if module.name != EXTRA
]
for name in imported:
  importlib.import_module(name)
in_wheel = {
  name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
  for name in names
  if name.endswith(".py")
}
in_wheel = {name for name in in_wheel if not name.startswith(EXTRA)}
assert in_wheel == {"memcache_jax", *imported}, in_wheel ^ set(imported)
assert "memcache_jax.pallas_kernels" in imported
print(f"{wheel.name}: imported memcache_jax and {len(imported)} modules of it")
