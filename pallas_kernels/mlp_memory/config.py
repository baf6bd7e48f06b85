"""Which calls the kernels take, and in what pieces."""

import functools
from dataclasses import dataclass, replace

_MIB = 2**20
_LANES = 128

# Fast memory of the smallest core, less what the compiler needs for what does
# not fit into registers.
_VMEM_LIMIT = (64 - 8) * _MIB
# Numbers between two maps that are computed at a time: more would spill.
_HIDDEN = 128 * 1024
# Tokens of an inner batch: their scores are a register or a few.
_COLUMNS = 256
# The same on a GPU: with more, registers spill.
_TRITON_COLUMNS = {"bfloat16": 32, "float32": 16}
# Networks whose gradients are taken together on a GPU: enough programs, and
# not too many numbers in between.
_TOGETHER = 8


@dataclass(frozen=True)
class Config:
  """How a call is cut up.

  Attributes:
    rows: tokens of a block, for which a network is fetched once.
    chunk: of these, that go through it together; a multiple of 128.
    vmem_limit_bytes: fast memory that the kernel may fill.
  """

  rows: int
  chunk: int
  vmem_limit_bytes: int = _VMEM_LIMIT


@dataclass(frozen=True)
class GradientConfig:
  """How the gradients of a call are cut up.

  Attributes:
    tokens: that stay in fast memory together; a multiple of `chunk`.
    chunk: of these, that go through a network together; a multiple of 128.
    vmem_limit_bytes: fast memory that the kernel may fill.
  """

  tokens: int
  chunk: int
  vmem_limit_bytes: int = _VMEM_LIMIT


@dataclass(frozen=True)
class Call:
  """Sizes of one call.

  Attributes:
    maps: input and output width of each affine map.
    k: key width.
    v: value width.
    dtype: of queries.
    tokens: of the call.
    networks: stored ones.
  """

  maps: tuple[tuple[int, int], ...]
  k: int
  v: int
  dtype: str
  tokens: int
  networks: int


def config(call: Call) -> Config:
  """The pieces for a call, from its sizes alone."""
  chunk = max(_HIDDEN // _widest(call) // _LANES, 1) * _LANES
  chunks = min(-(-call.tokens // chunk), max(1024 // chunk, 1))
  return Config(chunks * chunk, chunk)


def gradient_config(call: Call) -> GradientConfig:
  """The pieces of its gradients."""
  chunk = max(_HIDDEN // _widest(call) // _LANES, 1) * _LANES
  spans = 1
  while True:
    # Of one size, so that filling up the last takes little.
    tokens = _round_up(-(-call.tokens // spans), chunk)
    chosen = GradientConfig(tokens, chunk)
    fits = _vmem_of_gradients(call, chosen) <= _VMEM_LIMIT
    if fits or tokens == chunk:
      return chosen
    spans += 1


def supports(call: Call) -> str | None:
  """Why the TPU kernels cannot take a call; None if they can."""
  if reason := _wrong_operands(call) or _nothing(call):
    return reason
  forward = _vmem_bytes(call, config(call))
  backward = _vmem_of_gradients(call, gradient_config(call))
  return _too_large(max(forward, backward))


@dataclass(frozen=True)
class TritonConfig:
  """How the kernels for GPUs cut up a call.

  Attributes:
    rows: tokens of a program.
    columns: of the hidden layer, or else of the input, that it takes at a time.
    inner: of a width that products sum over, as much as one takes.
    warps: of a program.
    stages: iterations of a loop whose loads are on their way.
  """

  rows: int
  columns: int
  inner: int
  warps: int
  stages: int


def triton_config(call: Call) -> TritonConfig:
  """The pieces on a GPU, from the sizes alone."""
  return _triton_config(call, rows=64)


def triton_gradient_config(call: Call) -> TritonConfig:
  """The pieces of its gradients."""
  # What is around a norm is kept for its gradient.
  return _triton_config(call, rows=32)


def _triton_config(call: Call, rows: int) -> TritonConfig:
  # More would spill. Operands of products of float32 are two parts each.
  inner, stages = (16, 1) if call.dtype == "float32" else (64, 2)
  return TritonConfig(rows, columns=32, inner=inner, warps=8, stages=stages)


def for_selected(
  config: TritonConfig, call: Call, selected: int
) -> TritonConfig:
  """The same for a few networks of each token, whose tokens fill tiles.

  Args:
    config: of reading all; as many rows as a network selected as often as
      others has tokens, 16 at least.
    call: its sizes.
    selected: networks of each token.
  """
  rows = config.rows
  while rows > 16 and rows * call.networks > call.tokens * selected:
    rows //= 2
  return replace(config, rows=rows)


def networks_together(call: Call) -> int:
  """Of how many networks gradients are taken at a time; all or a divisor."""
  return max(i for i in range(1, _TOGETHER + 1) if call.networks % i == 0)


def triton_supports(call: Call, *, norm: bool) -> str | None:
  """Why the GPU kernels cannot take a call; None if they can.

  Args:
    call: its sizes, of a network of one hidden layer or none.
    norm: whether its output has one.
  """
  if reason := _wrong_operands(call) or _nothing(call):
    return reason
  return _wrong_tiles(call, norm)


@dataclass(frozen=True)
class BatchesConfig:
  """How inner batches are run.

  Attributes:
    vmem_limit_bytes: fast memory that the kernel may fill.
  """

  vmem_limit_bytes: int = _VMEM_LIMIT


@dataclass(frozen=True)
class BatchesCall:
  """Sizes of one call that trains a network.

  Attributes:
    maps: input and output width of each affine map.
    k: key width.
    v: value width.
    dtype: of queries, keys and values.
    columns: tokens that it writes, those of a window before it included.
    networks: of what is carried along: weights, momentum, start of the batch.
  """

  maps: tuple[tuple[int, int], ...]
  k: int
  v: int
  dtype: str
  columns: int
  networks: int


def batches_config(call: BatchesCall) -> BatchesConfig:
  """The pieces for a call, from its sizes alone."""
  del call
  return BatchesConfig()


def batches_supports(call: BatchesCall, *, documents: bool) -> str | None:
  """Why the TPU kernel cannot take such a call; None if it can.

  Args:
    call: its sizes.
    documents: whether any may begin.
  """
  if reason := _wrong_operands(call):
    return reason
  if call.columns > _COLUMNS:
    return (
      f"an inner batch, with the window before it, has up to {_COLUMNS} "
      f"tokens: got {call.columns}"
    )
  return _too_large(_vmem_of_batches(call, documents))


def batches_triton_config(call: BatchesCall) -> TritonConfig:
  """The pieces on a GPU, from the sizes alone."""
  # With wider blocks registers spill.
  inner = 16 if call.dtype == "float32" else 64
  return TritonConfig(call.columns, columns=16, inner=inner, warps=8, stages=1)


def batches_triton_supports(call: BatchesCall, *, norm: bool) -> str | None:
  """Why the GPU kernel cannot take such a call; None if it can."""
  if reason := _wrong_operands(call) or _wrong_tiles(call, norm):
    return reason
  most = _TRITON_COLUMNS[call.dtype]
  if call.columns > most:
    return (
      f"an inner batch, with the window before it, has up to {most} tokens in "
      f"{call.dtype}: got {call.columns}"
    )
  return None


def _wrong_tiles(call: Call | BatchesCall, norm: bool) -> str | None:
  for name, width in (("key", call.k), ("value", call.v)):
    if width > 256:
      return f"its {name} width is up to 256: got {width}"
  if norm and call.v != _power_of_2(call.v):
    return f"the width of a norm is a power of 2: got {call.v}"
  return None


def _power_of_2(width: int) -> int:
  return 1 << (width - 1).bit_length()


def _wrong_operands(call: Call | BatchesCall) -> str | None:
  if call.dtype not in ("float32", "bfloat16"):
    return f"its queries are float32 or bfloat16: got {call.dtype}"
  for width in sorted({call.k, call.v, *sum(call.maps, ())}):
    if width % 32:
      return f"its widths are multiples of 32: got {width}"
  return None


def _nothing(call: Call) -> str | None:
  if call.tokens < 1 or call.networks < 1:
    return (
      "its tokens and networks are at least one: "
      f"got {call.tokens} and {call.networks}"
    )
  return None


def _too_large(need: int) -> str | None:
  if need <= _VMEM_LIMIT:
    return None
  return (
    "a network must fit into fast memory: "
    f"it takes {need // _MIB} of {_VMEM_LIMIT // _MIB} MiB"
  )


def _widest(call: Call | BatchesCall) -> int:
  return max(call.k, call.v, *(max(widths) for widths in call.maps))


def _vmem_bytes(call: Call, chosen: Config) -> int:
  up = functools.partial(_round_up, multiple=_LANES)
  weights = sum(up(i) * up(o) for i, o in call.maps)
  # As they come in, of two buffers, and as operands; a chunk between two maps;
  # queries, reads and gates, of which 8 rows are the least, of two buffers.
  chunk = 8 * chosen.chunk * up(_widest(call))
  rows = chosen.rows * (up(call.k) + up(call.v) + 8)
  return 4 * (3 * weights + chunk + 2 * rows)


def _vmem_of_gradients(call: Call, chosen: GradientConfig) -> int:
  up = functools.partial(_round_up, multiple=_LANES)
  weights = sum(up(i) * up(o) for i, o in call.maps)
  size = 4 if call.dtype == "float32" else 2
  # Weights come in and their gradients go out, of two buffers each, and are
  # operands; a chunk before and after what is between two maps, forwards and
  # backwards; of a token its query, both gradients and the gates.
  chunk = 12 * 4 * chosen.chunk * up(_widest(call))
  token = 4 * size * up(call.k) + 2 * size * up(call.v) + 4 * up(call.k)
  token += 4 * 8 * 4
  return 4 * 5 * weights + chunk + chosen.tokens * token


def _vmem_of_batches(call: BatchesCall, documents: bool) -> int:
  up = functools.partial(_round_up, multiple=_LANES)
  weights = sum(up(i) * up(o) for i, o in call.maps)
  # What is carried along comes in and goes out, each of two buffers, as do
  # weights of new documents; operands and what is written.
  networks = 4 * call.networks + 2 * documents + 3
  widths = up(call.k) + up(call.v) + sum(up(i) + up(o) for i, o in call.maps)
  return 4 * (networks * weights + 4 * up(call.columns) * widths)


def _round_up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple
