"""The kernels compile for an H100: registers, shared memory, supported ops."""

import pytest

from examples.benchmarks import gpu_resources
from examples.benchmarks.gpu_calls import Case

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
  "read_selected_networks": ("read", "read_vjp", "networks_vjp"),
  "mlp_memory": ("batches",),
}
ODD = {"length": 40, "tokens": 1111, "carried": 2}


@pytest.mark.aot("jax_cuda13_plugin")
@pytest.mark.parametrize(
  "case",
  [
    Case("cached_linear_attention", 256),
    Case("cached_linear_attention", 128, "float32", length=16, tokens=512),
    *(Case(op, 96, **ODD) for op in KERNELS),
  ],
  ids=lambda case: f"{case.op}_{case.width}_{case.dtype}",
)
def test_compiles(case):
  text = gpu_resources.compile_for_h100(case).as_text()
  for kernel in KERNELS[case.op]:
    assert f'name = "memcache_{case.op}_{kernel}"' in text
