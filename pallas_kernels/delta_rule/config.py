"""Which calls the kernels take, and in what pieces."""

import math
from dataclasses import dataclass

_MIB = 2**20
# Fast memory of the smallest core, less what the compiler needs for what does
# not fit into registers.
_VMEM_LIMIT = (64 - 8) * _MIB


@dataclass(frozen=True)
class Config:
  """How a call is cut up.

  Attributes:
    heads: whose chunks are computed side by side: the products of one follow
      from each other, and those of the others fill the time between.
    vmem_limit_bytes: fast memory that a kernel may fill.
  """

  heads: int
  vmem_limit_bytes: int = _VMEM_LIMIT


@dataclass(frozen=True)
class Call:
  """Sizes of one call.

  Attributes:
    k: key width.
    v: value width.
    dtype: of queries, keys and values.
    heads: of the call.
  """

  k: int
  v: int
  dtype: str
  heads: int


def config(call: Call) -> Config:
  """The pieces for a call, from its sizes alone."""
  # Products of float32 are made of six, which fill the time by themselves.
  side_by_side = 1 if call.dtype == "float32" else 4
  return Config(math.gcd(call.heads, side_by_side))


@dataclass(frozen=True)
class TritonConfig:
  """How the kernels for GPUs cut up a call.

  Attributes:
    chunk: tokens of a chunk, a power of two.
    columns: of the memory, and of what is read, that a program takes.
    inner: of a width that products sum over, as much as one takes.
    warps: of a program.
    chain_warps: of one that goes along the chunks.
    stages: iterations of a loop whose loads are on their way.
  """

  chunk: int
  columns: int
  inner: int
  warps: int
  chain_warps: int
  stages: int


def triton_config(call: Call) -> TritonConfig:
  """The pieces on a GPU, from the sizes alone."""
  # More would spill. Operands of products of float32 are two parts each.
  if call.dtype == "float32":
    return TritonConfig(
      chunk=64, columns=32, inner=16, warps=8, chain_warps=4, stages=1
    )
  return TritonConfig(
    chunk=64,
    columns=64 if call.k <= 128 else 32,
    inner=64,
    warps=8,
    chain_warps=8,
    stages=2,
  )


def supports(call: Call) -> str | None:
  """Why the kernels cannot take a call; None if they can."""
  if call.dtype not in ("float32", "bfloat16"):
    return f"its operands are float32 or bfloat16: got {call.dtype}"
  for name, width in (("key", call.k), ("value", call.v)):
    if width % 32 or not 32 <= width <= 256:
      return f"its {name} width is a multiple of 32 up to 256: got {width}"
  return None
