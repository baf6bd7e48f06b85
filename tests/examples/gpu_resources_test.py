"""Reading what the GPU's compiler wrote down; no times without a GPU."""

import pytest

from examples.benchmarks import gpu_check, gpu_resources

SAID = """
ptxas info    : Compiling entry function 'a_read' for 'sm_90a'
ptxas info    : Function properties for a_read
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative
ptxas info    : Compiling entry function 'b' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 0 barriers
"""
SEQUENCE = """
001: kCustomKernel [source | sink] a_read grid: [8, 2, 1] \
threads: [256, 1, 1]  shared_memory: 65536 bytes
002: kCustomKernel [source | sink] b grid: [8, 2, 1] \
threads: [128, 1, 1]  shared_memory: 0 bytes
"""


def test_what_a_kernel_takes():
  assert gpu_resources.registers(SAID) == {"a_read": (255, 16), "b": (26, 0)}
  assert gpu_resources.launches(SEQUENCE) == {
    "a_read": (256, 65536),
    "b": (128, 0),
  }


def test_no_times_without_a_gpu():
  with pytest.raises(SystemExit, match="needs a GPU"):
    gpu_check.main([])
