"""The kernels compile for an H100: registers, shared memory, supported ops."""

import pytest

from examples.benchmarks import gpu_resources
from examples.benchmarks.gpu_resources import Case

KERNELS = {
  "cached_linear_attention": (
    *("write", "chain", "read", "read_vjp", "write_k_vjp"),
  ),
  "cache_read": ("read", "read_vjp", "states_vjp"),
  "selected_read": ("read", "read_vjp", "states_vjp"),
  "delta_rule": (
    *("solve", "chain", "read", "read_vjp", "chain_vjp", "tokens_vjp"),
  ),
  "read_networks": ("read", "read_vjp", "networks_vjp"),
}
CASES = {
  "plain_256": Case(256),
  "odd_96": Case(96, length=40, tokens=1111, carried=2),
  "exact_128": Case(128, "float32", length=16, tokens=512),
}


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize(
  ("op", "name"),
  [
    *(("cached_linear_attention", name) for name in CASES),
    ("cache_read", "odd_96"),
    ("selected_read", "odd_96"),
    ("delta_rule", "odd_96"),
    ("read_networks", "odd_96"),
  ],
)
def test_compiles(op, name):
  text = gpu_resources.compile_for_h100(CASES[name], op).as_text()
  for kernel in KERNELS[op]:
    assert f'name = "memcache_{op}_{kernel}"' in text
