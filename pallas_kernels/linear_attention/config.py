"""Which calls the kernels take, and in what pieces."""

import math
from dataclasses import dataclass, replace

_MIB = 2**20
_LANES = 128

# Fast memory of a core. Where the chip is not known, that of the smallest.
_VMEM = {"v5e": 128 * _MIB, "v5p": 64 * _MIB, "v6e": 128 * _MIB}
_SMALLEST = 64 * _MIB
# Left to the compiler, for what does not fit into registers.
_SPARE = 8 * _MIB


@dataclass(frozen=True)
class Config:
  """How a call is cut up.

  Attributes:
    segments_per_piece: segments whose tokens fill whole vector registers
      together; their online reads are one masked matmul.
    pieces_per_block: pieces in one step of the grid, which share the reads of
      all states before it.
    vmem_limit_bytes: fast memory that a kernel may fill.
    streamed: whether stored states stay in main memory, from where each block
      fetches them, because fast memory has no room for all.
  """

  segments_per_piece: int
  pieces_per_block: int
  vmem_limit_bytes: int
  streamed: bool = False

  @property
  def segments_per_block(self) -> int:
    return self.segments_per_piece * self.pieces_per_block


@dataclass(frozen=True)
class Call:
  """Sizes of one call.

  Attributes:
    k: key width.
    v: value width.
    dtype: of queries, keys and values.
    segment_length: tokens of a segment.
    segments: of the call.
    carried: memories carried into it.
    chip: "v5e", "v5p", "v6e" or None for any.
  """

  k: int
  v: int
  dtype: str
  segment_length: int
  segments: int
  carried: int
  chip: str | None = None


def config(call: Call) -> Config:
  """The pieces for a call, from its sizes alone."""
  per_piece = _LANES // math.gcd(call.segment_length, _LANES)
  # So many queries at a time amortise loading a state. More would spill, as
  # would products of float32, which are made of several.
  rows = 256 if call.dtype == "float32" else 1024
  pieces = max(1, min(4, rows // (per_piece * call.segment_length)))
  pieces = min(pieces, -(-call.segments // per_piece))
  if per_piece > 2:
    pieces = min(pieces, 2)  # the writes of all segments are unrolled
  # The last block is filled up with empty segments: with one in eight.
  while pieces > 1 and 8 * (-call.segments % (pieces * per_piece)) > (
    call.segments
  ):
    pieces -= 1
  limit = _VMEM.get(call.chip or "", _SMALLEST) - _SPARE
  resident = Config(per_piece, pieces, limit)
  if vmem_bytes(call, resident) <= limit:
    return resident
  return replace(resident, streamed=True)


@dataclass(frozen=True)
class TritonConfig:
  """How the kernels for GPUs cut up a call.

  Attributes:
    reads: tokens of a program that reads for them.
    writes: tokens of one that takes the gradients of what they wrote.
    columns: of these results.
    state: side of the tiles of states that are summed up.
    step: tokens per iteration of loops.
    warps: of a program.
    stages: iterations of a loop whose loads are on their way.
  """

  reads: int
  writes: int
  columns: int
  state: int
  step: int
  warps: int
  stages: int


def triton_config(call: Call) -> TritonConfig:
  """The pieces on a GPU, from the sizes alone."""
  # As many queries as registers hold: all read the same states, which would
  # else come too slowly. Their operand must also fit into shared memory.
  if call.dtype == "float32":
    return TritonConfig(64, 64, 32, 64, 32, 4, 1)
  rows = 256 if max(call.k, call.v) <= 128 else 128
  return TritonConfig(rows, 128, 64, 128, 64, 8, 2)


def triton_supports(call: Call) -> str | None:
  """Why the GPU kernels cannot take a call; None if they can."""
  if call.segment_length < 16:
    return f"its segments have at least 16 tokens: got {call.segment_length}"
  return _unsupported_operands(call)


def _unsupported_operands(call: Call) -> str | None:
  if call.dtype not in ("float32", "bfloat16"):
    return f"its operands are float32 or bfloat16: got {call.dtype}"
  for name, width in (("key", call.k), ("value", call.v)):
    if width % 32 or not 32 <= width <= 256:
      return f"its {name} width is a multiple of 32 up to 256: got {width}"
  return None


def supports(call: Call) -> str | None:
  """Why the TPU kernels cannot take a call; None if they can."""
  reason = _unsupported_operands(call)
  if reason is not None:
    return reason
  length = call.segment_length
  if length % 16 or not 16 <= length <= 512:
    return f"its segment length is a multiple of 16 up to 512: got {length}"
  chosen = config(call)
  need, limit = vmem_bytes(call, chosen), chosen.vmem_limit_bytes
  if need > limit:
    return (
      f"the gates of its {call.carried + call.segments} states must fit into "
      f"fast memory: all takes {need // _MIB} of {limit // _MIB} MiB"
    )
  return None


def vmem_bytes(call: Call, chosen: Config) -> int:
  """Fast memory of the backward pass, which takes more than the forward."""
  size = 4 if call.dtype == "float32" else 2
  k, v = _round_up(call.k), _round_up(call.v)
  block = chosen.segments_per_block
  rows, slots = block * call.segment_length, call.carried + call.segments
  # As operands, their gradients, and both as they come in, of two buffers.
  state = k * v * (size + 4 + 4 * 4)
  states = (block + 3) * state if chosen.streamed else (slots + block) * state
  # Six blocks of tokens of two buffers, four transposes; gates.
  row = 12 * size * (k + v) // 2 + 4 * (k + v) * 4 + 4 * 4 * (slots + 16)
  return states + rows * row


def _round_up(x: int) -> int:
  return -(-x // _LANES) * _LANES
