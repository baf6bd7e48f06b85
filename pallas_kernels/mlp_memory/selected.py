"""Reads of a few selected networks per token, on a TPU.

The kernels are those of `cache_read`, forwards and backwards; what they read is
a network.
"""

import functools
from typing import Any

from ..cache_read.selected import Reader
from .network import Forward, pull, read


def networks(forward: Forward, k: int, v: int, dtype: Any) -> Reader:
  """Networks with keys and values of these widths, with operands of a type."""

  def pull_gated(network, static, x, gate, d_read):
    return pull(forward, dtype, network, static, x, gate(v), d_read)

  return Reader(
    name="memcache_mlp_memory_selected",
    widths=(k, v),
    dtype=dtype,
    read=functools.partial(read, forward, dtype),
    pull=pull_gated,
  )
