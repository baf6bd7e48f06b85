"""The kernels compile for an H100: registers, shared memory, supported ops."""

import pytest

from examples.benchmarks import gpu_resources
from examples.benchmarks.gpu_resources import Case

CASES = {
  "plain_256": Case(256),
  "odd_96": Case(96, length=40, tokens=1111, carried=2),
  "exact_128": Case(128, "float32", length=16, tokens=512),
}


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize("name", CASES)
def test_compiles(name):
  text = gpu_resources.compile_for_h100(CASES[name]).as_text()
  for kernel in ("write", "chain", "read", "read_vjp", "write_k_vjp"):
    assert f'name = "{gpu_resources.PREFIX}{kernel}"' in text
