"""Which calls the kernels take, and in what pieces."""

from dataclasses import dataclass

from ..linear_attention.config import TritonConfig

_MIB = 2**20
_LANES = 128
_SUBLANES = 8

# Fast memory of the smallest core, less what the compiler needs for what does
# not fit into registers.
_VMEM_LIMIT = (64 - 8) * _MIB
# Of it, for the states of a block, of two buffers.
_VMEM_OF_STATES = 16 * _MIB
# Tables of tiles lie in scalar memory, two words a tile.
_MOST_TILES = 2**16
# States on their way, and the fast memory they take, where they are large.
_MOST_IN_RING = 16
_VMEM_OF_RING = _MIB
_LARGEST_TILE = 160
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


def triton_config(call: Call) -> TritonConfig:
  """The pieces on a GPU, from the sizes alone."""
  # As many queries as registers hold: all read the same states, which would
  # else come too slowly. Their operand must also fit into shared memory.
  if call.dtype == "float32":
    return TritonConfig(64, 64, 32, 64, 32, 4, 1)
  rows = 256 if max(call.k, call.v) <= 128 else 128
  return TritonConfig(rows, rows, 64, 128, 64, 8, 2)


def triton_supports(call: Call) -> str | None:
  """Why the GPU kernels cannot take a call; None if they can."""
  for name, width in (("key", call.k), ("value", call.v)):
    if width > 256:
      return f"its {name} width is up to 256: got {width}"
  return supports(call)


@dataclass(frozen=True)
class SelectedConfig:
  """How a call that reads a few states per token is cut up.

  Attributes:
    tokens: of a block, whose pairs are sorted together.
    selected: states of each token.
    tile: places of a tile, a multiple of 8.
    tiles_per_step: tiles that are read together, a power of 2; none of their
      products waits for another.
    ring: states in fast memory, a power of 2 from twice `tiles_per_step` on;
      those that are not read yet are on their way.
    vmem_limit_bytes: fast memory that a kernel may fill.
  """

  tokens: int
  selected: int
  tile: int
  tiles_per_step: int = 1
  ring: int = 2
  vmem_limit_bytes: int = _VMEM_LIMIT

  @property
  def tokens_per_column(self) -> int:
    """Tokens whose places are one column of a table; a power of 2."""
    tokens = _LANES // 2
    while tokens * self.selected > _LANES:
      tokens //= 2
    return tokens


@dataclass(frozen=True)
class SelectedCall:
  """Sizes of one call.

  Attributes:
    k: key width.
    v: value width.
    dtype: of queries.
    tokens: of the call.
    states: stored states.
    selected: of these, by each token.
    heads: of all rows together.
    maps: sizes of the affine maps, where a state is a network; empty where it
      is a matrix.
  """

  k: int
  v: int
  dtype: str
  tokens: int
  states: int
  selected: int
  heads: int
  maps: tuple[tuple[int, int], ...] = ()


def selected_config(call: SelectedCall) -> SelectedConfig:
  """The pieces for a call, from its sizes alone."""
  per_step, ring = _tiles_per_step(call), _MOST_IN_RING
  while ring > 2 * per_step and ring * _state(call) > _VMEM_OF_RING:
    ring //= 2
  tokens = _round_up(call.tokens, _LANES // 2)
  while True:
    pairs = tokens * call.selected
    tile = _tile(pairs, call.states)
    config = SelectedConfig(tokens, call.selected, tile, per_step, ring)
    if tokens <= _LANES or _vmem_of_selected(call, config) <= _VMEM_LIMIT:
      return config
    tokens = _round_up(tokens // 2, _LANES // 2)


def _tile(pairs: int, states: int) -> int:
  """Places of a tile, so that few states leave much of their last one.

  A state that is selected as often as others has one tile, or a few that are as
  large, with room for a quarter more.
  """
  room = 5 * pairs // (4 * states)
  return max(_round_up(room // (-(-room // _LARGEST_TILE) or 1), 8), 8)


def _tiles_per_step(call: SelectedCall) -> int:
  """As many as registers have room for."""
  widest = max(call.k, call.v)
  if call.maps or widest > 2 * _LANES:
    return 1
  return 2 if widest > _LANES else 4


def selected_supports(call: SelectedCall) -> str | None:
  """Why the TPU kernels cannot take such a call; None if they can."""
  reason = supports(Call(call.k, call.v, call.dtype, call.tokens, call.states))
  if reason:
    return reason
  if not 1 <= call.selected <= 8:
    return f"each token selects 1 to 8 states: got {call.selected}"
  for width in sum(call.maps, ()):
    if width % 32:
      return f"its widths are multiples of 32: got {width}"
  chosen = selected_config(call)
  need = _vmem_of_selected(call, chosen)
  if need > _VMEM_LIMIT:
    return (
      "a state must fit into fast memory: "
      f"it takes {need // _MIB} of {_VMEM_LIMIT // _MIB} MiB"
    )
  blocks = -(-call.tokens // chosen.tokens)
  table = blocks * call.heads * tiles(call, chosen)
  if table > _MOST_TILES:
    return f"all its rows and heads have at most {_MOST_TILES} tiles: {table}"
  return None


@dataclass(frozen=True)
class SelectedTritonConfig:
  """How the kernels for GPUs cut up such a call.

  Attributes:
    tile: places of a tile, a power of two from 16 on.
    columns: of what is read, and a side of the gradient of a state, that a
      program takes.
    warps: of a program.
    stages: iterations of a loop whose loads are on their way.
  """

  tile: int
  columns: int
  warps: int
  stages: int


def selected_triton_config(call: SelectedCall) -> SelectedTritonConfig:
  """The pieces on a GPU, from the sizes alone."""
  exact = call.dtype == "float32"
  tile, most = 16, 64 if exact else 128
  while tile < most and 2 * tile * call.states <= call.tokens * call.selected:
    tile *= 2
  columns = 64 if exact or max(call.k, call.v) > 128 else 128
  return SelectedTritonConfig(tile, columns, 4 if tile < 128 else 8, 2)


def selected_triton_supports(call: SelectedCall) -> str | None:
  """Why the GPU kernels cannot take such a call; None if they can."""
  return triton_supports(
    Call(call.k, call.v, call.dtype, call.tokens, call.states)
  )


def tiles(call: SelectedCall, chosen: SelectedConfig) -> int:
  """Of one block of tokens and head; each state may leave one unfilled."""
  pairs = chosen.tokens * call.selected
  count = pairs // chosen.tile + min(call.states, pairs)
  return _round_up(count, chosen.tiles_per_step)


def table_shape(chosen: SelectedConfig) -> tuple[int, int]:
  """Of the places of a head; what is copied is whole registers."""
  tokens = chosen.tokens_per_column
  return tokens * chosen.selected, lanes(-(-chosen.tokens // tokens))


def lanes(count: int) -> int:
  """Columns that a table of this many takes."""
  return _round_up(count, _LANES)


def _vmem_of_selected(call: SelectedCall, chosen: SelectedConfig) -> int:
  """Fast memory of the pass that takes more."""
  k, v = lanes(call.k), lanes(call.v)
  places = tiles(call, chosen) * chosen.tile
  size = 4 if call.dtype == "float32" else 2
  # Words of tokens and what is added up for them, of two buffers each; words
  # and what is read at places.
  rows = [
    chosen.tokens * 2 * (4 * words + out) + places * 4 * (words + read)
    for words, out, read in (
      (_words(call, call.k), 4 * v, v),
      (_words(call, call.k, call.v), size * k, k),
    )
  ]
  gates = 4 * 4 * chosen.tile * lanes(tiles(call, chosen))
  # Those in the ring and as operands, and gradients; what a tile is before and
  # after what is between two maps, forwards and backwards.
  states = (chosen.ring + 3 * chosen.tiles_per_step + 2) * _state(call)
  widest = lanes(max(call.k, call.v, *sum(call.maps, ())))
  values = 12 * 4 * chosen.tile * widest
  return max(rows) + gates + states + values


def _state(call: SelectedCall) -> int:
  """Bytes of a state."""
  maps = call.maps or ((call.k, call.v),)
  return 4 * sum(_round_up(i, _SUBLANES) * lanes(o) for i, o in maps)


def _words(call: SelectedCall, *widths: int) -> int:
  """Lanes of the words that hold rows of these widths."""
  total = sum(lanes(width) for width in widths)
  if call.dtype == "bfloat16" and total == sum(widths):
    return lanes(total // 2)
  return total


def _round_up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple
