"""Strict JAX for every test, and the switches tests share.

Nothing here may import memcache_jax: pytest's jaxtyping option has to see the
package's first import to check the shapes in its signatures.
"""

import gc
import importlib.metadata
import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if importlib.metadata.version("jaxlib").startswith(
  "0.10."
) and not importlib.util.find_spec("libtpu"):
  # Tests wait for compiling, which takes half of the time without the newer
  # way of writing loops. Later versions have no other, and no such flag; nor
  # has the compiler for TPUs, which reads the same variable.
  flags = (os.environ.get("XLA_FLAGS"), "--xla_cpu_use_fusion_emitters=false")
  os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))

import jax
import jaxtyping
import pytest
from flax import nnx

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tests compile far more than they compute.
jax.config.update("jax_disable_most_optimizations", True)
# Imports and traces make objects by the million, most of which live on: to walk
# over all of them as often as is the default takes a tenth of the time.
gc.set_threshold(50_000)

# Every program that was compiled is several mappings of memory, of which Linux
# gives a process 65,530; one that needs more is killed.
_MAPPINGS = Path("/proc/self/maps")
_MOST_MAPPINGS = 30_000
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def room_for_programs() -> Iterator[None]:
  """Forgets all programs when they are many: one process may run all tests."""
  yield
  # To count them takes as long as a short test.
  if next(_tests) % 50 == 0 and _MAPPINGS.exists():
    if _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS:
      jax.clear_caches()


@pytest.fixture(params=["graph", "tree"])
def nnx_mode(request: pytest.FixtureRequest) -> Iterator[str]:
  """Runs a test in both NNX modes; tree mode is to become the default."""
  graph = request.param == "graph"
  with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
    yield request.param


@pytest.fixture
def as_a_user() -> Iterator[None]:
  """Without the run-time types of the tests, which users do not have.

  Bad arguments must be refused by the library itself.
  """
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Deselects what this machine cannot run; the closing line counts it."""
  selected = [item for item in items if _can_run(item)]
  deselected = [item for item in items if item not in selected]
  if deselected:
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected


def _can_run(item: pytest.Item) -> bool:
  modules = (m for mark in item.iter_markers("aot") for m in mark.args)
  return all(importlib.util.find_spec(module) for module in modules)
