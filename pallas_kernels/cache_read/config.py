"""Which calls the kernels take, and in what pieces."""

from dataclasses import dataclass

_MIB = 2**20
_LANES = 128
_SUBLANES = 8

# Fast memory of the smallest core, less what the compiler needs for what does
# not fit into registers.
_VMEM_LIMIT = (64 - 8) * _MIB
# Of it, for the states of a block, of two buffers.
_VMEM_OF_STATES = 16 * _MIB
# Queries that are loaded at a time, of a width of 256. More would spill, as
# would products of float32, which are made of several.
_ROWS = {"float32": 256, "bfloat16": 1024}


@dataclass(frozen=True)
class Config:
  """How a call is cut up.

  Attributes:
    rows: tokens of a block, a multiple of 128.
    states: stored states of a block, a multiple of 8 or all of them. Where
      they are all, they are fetched once per head; else once per block of
      tokens, while the block before is used.
    vmem_limit_bytes: fast memory that a kernel may fill.
  """

  rows: int
  states: int
  vmem_limit_bytes: int = _VMEM_LIMIT


@dataclass(frozen=True)
class Call:
  """Sizes of one call.

  Attributes:
    k: key width.
    v: value width.
    dtype: of queries.
    tokens: of the call.
    states: stored states.
  """

  k: int
  v: int
  dtype: str
  tokens: int
  states: int


def config(call: Call) -> Config:
  """The pieces for a call, from its sizes alone."""
  widest = max(call.k, call.v, 256)
  most = _ROWS[call.dtype] * 256 // widest // _LANES * _LANES
  # Blocks of one size, so that filling up the last takes little.
  blocks = -(-call.tokens // max(most, _LANES))
  rows = _round_up(-(-call.tokens // blocks), _LANES)
  state = 2 * 4 * _round_up(call.k, _SUBLANES) * _round_up(call.v, _LANES)
  states = _VMEM_OF_STATES // state // _SUBLANES * _SUBLANES
  return Config(rows, min(max(states, _SUBLANES), call.states))


def supports(call: Call) -> str | None:
  """Why the TPU kernels cannot take a call; None if they can."""
  if call.dtype not in _ROWS:
    return f"its queries are float32 or bfloat16: got {call.dtype}"
  for name, width in (("key", call.k), ("value", call.v)):
    if width % 32 or not 32 <= width <= 512:
      return f"its {name} width is a multiple of 32 up to 512: got {width}"
  if call.tokens < 1 or call.states < 1:
    return (
      "its tokens and states are at least one: "
      f"got {call.tokens} and {call.states}"
    )
  return None


def _round_up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple
