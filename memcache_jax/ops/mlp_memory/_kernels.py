"""Between `mlp_memory` and its kernels: blocks, and scalars of their rows."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Bool, Float, Params
from memcache_jax.ops import _dispatch
from memcache_jax.ops.mlp_memory import _chunked, _read_triton
from memcache_jax.ops.mlp_memory._architecture import MLP, GatedMLP, is_bias
from memcache_jax.ops.mlp_memory._block import Blocks, Carry, Written, begin
from memcache_jax.ops.mlp_memory._closing import Closing
from memcache_jax.ops.mlp_memory._coefficients import Rows, unroll
from memcache_jax.ops.mlp_memory._grid import Inputs
from memcache_jax.ops.mlp_memory._loss import L2, Dot
from memcache_jax.ops.mlp_memory._pieces import num_pieces
from memcache_jax.ops.mlp_memory._state import Mix, MLPMemoryState, Rule

_ROWS, _LANES = 16, 128


def why_not(
  rule: Rule,
  inputs: Inputs,
  mix: Mix | None,
  state: MLPMemoryState | None,
  mask: Bool[Array, "b t"] | None,
  starts: Bool[Array, "b t"] | None,
) -> dict[str, str | None]:
  """Why each kernel cannot take a call; None if it can."""
  if (reason := _why_none(rule, inputs, mix)) is not None:
    return dict.fromkeys(("mosaic_tpu", "triton"), reason)
  module = _dispatch.kernel_module("mlp_memory.config")
  call = _call(module, rule, inputs.k, inputs.v)
  documents = not (state is None and mask is None and starts is None)
  return {
    "mosaic_tpu": module.batches_supports(call, documents=documents),
    "triton": _read_triton.why_deep(rule.architecture)
    or module.batches_triton_supports(call, norm=rule.architecture.has_norm),
  }


def _why_none(rule, inputs, mix):
  """Why no kernel can take a call; None if one may."""
  if (reason := _dispatch.why_not_installed()) is not None:
    return reason
  if type(rule.architecture) not in (MLP, GatedMLP):
    return "a network of one's own may do what a kernel cannot"
  if type(rule.loss) not in (L2, Dot):
    return f"its loss is L2 or Dot: got {rule.loss}"
  if type(rule.closing) is not Closing:
    return f"nothing happens after its inner batches: got {rule.closing}"
  if rule.delayed:
    return "its tokens read their own weights, not those before their batch"
  if mix is not None:
    return "it reads the online memory alone, not a mix"
  size, (k, v) = rule.inner_batch, (inputs.k.shape[-1], inputs.v.shape[-1])
  # Of any part of one, too: a large prime is one piece, but not its parts.
  if any(num_pieces(rule, part, k, v) > 1 for part in range(1, size + 1)):
    return (
      "an inner batch of more tokens than a map is wide is read in pieces: "
      f"got {size}"
    )
  return None


def _call(module: ModuleType, rule: Rule, k: Array, v: Array) -> Any:
  """The kernels' `BatchesCall`."""
  size, widths = rule.inner_batch, (k.shape[-1], v.shape[-1])
  maps = rule.architecture.affine_maps(*widths).values()
  return module.BatchesCall(
    *(tuple((x.in_dim, x.out_dim) for x in maps), *widths, k.dtype.name),
    columns=size if rule.pairwise else size + rule.tail,
    networks=2 + rule.has_momentum,
  )


def _network(module: ModuleType, rule: Rule, k: Array, v: Array) -> Any:
  """The kernels' `Network`."""
  maps = rule.architecture.affine_maps(k.shape[-1], v.shape[-1])
  return module.Network(
    rule.architecture.forward,
    _loss_gradient(rule),
    {name: (size.in_dim, size.out_dim) for name, size in maps.items()},
    rule.pairwise,
  )


def _loss_gradient(rule: Rule) -> Any:
  return lambda output, target: rule.loss.gradient(output, target, {})


def run_blocks(
  choice: _dispatch.Choice,
  rule: Rule,
  static: Params,
  initial: Params,
  memories: Params | None,
  carry: Carry | None,
  blocks: Blocks,
) -> tuple[Carry, Float[Array, "b t n v"]]:
  """`_chunked.run_blocks`, by a kernel where it is chosen or there is one."""
  del memories  # None, see `why_not`
  if choice == "by_platform" and blocks.q.shape[0] == 1:
    # Nothing stays in fast memory for a second batch.
    return _chunked.run_blocks(rule, static, initial, None, carry, blocks)
  letters = lambda tree: jax.tree.map(lambda x: _LETTERS[x.ndim], tree)
  carry_axes = letters(begin(rule, initial) if carry is None else carry)
  if blocks.fresh is None and carry is not None:
    initial = {}
  y, end = _dispatch.run_spread(
    "mlp_memory",
    choice,
    functools.partial(_xla, rule),
    {
      "mosaic_tpu": functools.partial(_mosaic_tpu, rule),
      "triton": functools.partial(_triton, rule),
    },
    None,
    (
      blocks.q,
      # Gates are in the coefficients.
      (blocks.written.k, blocks.written.v),
      blocks.coefficients,
      (blocks.fresh, blocks.full, blocks.used),
      static,
      initial,
      carry,
    ),
    (
      "g p b n d k",
      ("g b n e k", "g b n e v"),
      _coefficient_axes(blocks.coefficients),
      jax.tree.map(lambda _: "g b", (blocks.fresh, blocks.full, blocks.used)),
      jax.tree.map(lambda _: "x n y v", static),
      letters(initial),
      letters(carry),
    ),
    ("b t n v", carry_axes),
  )
  return end, y


# Of weights and biases.
_LETTERS = {4: "b n i o", 3: "b n o"}


def _coefficient_axes(coefficients):
  rows, row = "g p b n d", "g p b n"
  if isinstance(coefficients, Rows):
    return jax.tree.map(lambda _: rows, coefficients)._replace(step=f"{rows} w")
  of_rows = lambda x: rows if x.ndim == 5 else f"{rows} e"
  of_end = lambda x: row if x.ndim == 4 else f"{row} e"
  axes = jax.tree.map(of_rows, coefficients._replace(end=None))
  return axes._replace(end=jax.tree.map(of_end, coefficients.end))


def _xla(rule, q, written, coefficients, marks, static, initial, carry):
  fresh, full, used = marks
  k, v = written
  blocks = Blocks(Written(k, v, {}), coefficients, q, None, fresh, full, used)
  carry, y = _chunked.run_blocks(rule, static, initial, None, carry, blocks)
  return y, carry


def _mosaic_tpu(rule, q, written, coefficients, marks, static, initial, carry):
  if carry is None:
    carry, initial = begin(rule, initial), {}
  pieces = _dispatch.kernel_module("mlp_memory.batches")
  config = _dispatch.kernel_module("mlp_memory.config").BatchesConfig()
  scalars, places = _scalars(pieces, unroll(coefficients))
  q = q[:, 0]
  columns = lambda x: {
    name: x[:, :, None] if is_bias(name) else x for name, x in x.items()
  }
  carried = {
    name: columns(x)
    for name, x in carry._asdict().items()
    if x is not None and name != "decay"
  }
  operands = pieces.Operands(
    _marks(marks, q),
    *(_fill(x, 3) for x in (q, *written)),
    scalars,
    {name: x[0] for name, x in static.items()},
    columns(initial) if initial else None,
    carried,
  )
  network = _network(pieces, rule, *written)
  y, carried = pieces.fwd(network, operands, places, config=config)
  carried = {
    kind: {
      name: x[:, :, 0] if is_bias(name) else x for name, x in weights.items()
    }
    for kind, weights in carried.items()
  }
  y = rearrange(y[:, :, :, : q.shape[3]], "g b n d v -> b (g d) n v")
  return y, carry._replace(**carried)


def _triton(rule, q, written, coefficients, marks, static, initial, carry):
  if carry is None:
    carry, initial = begin(rule, initial), {}
  pieces = _dispatch.kernel_module("mlp_memory.config")
  module = _dispatch.kernel_module("mlp_memory.triton_batches")
  q, (k, v), (b, n) = q[:, 0], written, q.shape[2:4]
  marks = _marks(marks, q)
  coefficients = jax.tree.map(lambda x: x[:, 0], unroll(coefficients))
  end = coefficients.end
  coefficients = {
    "write": coefficients.write,
    "decay": coefficients.decay,
    "carry": coefficients.carry,
    "last": end.write,
    "momentum_write": end.momentum_write,
    "end_decay": end.decay,
    "end_carry": end.carry,
    "momentum_decay": end.momentum_decay,
  }
  slot = functools.partial(jax.tree.map, lambda x: x[:, None])
  kinds = carry._replace(decay=None)._asdict()
  operands = module.Operands(
    {"q": q, "k": k, "v": v},
    jnp.broadcast_to(marks[..., None], (*marks.shape, n)),
    {name: x for name, x in coefficients.items() if x is not None},
    {
      name: jnp.broadcast_to(jnp.swapaxes(x, 1, 2), (b, 1, n, x.shape[3]))
      for name, x in static.items()
    },
    slot(initial),
    slot({name: x for name, x in kinds.items() if x is not None}),
  )
  memory = module.Memory(
    _read_triton.network_of(rule.architecture, k.shape[-1], v.shape[-1]),
    _loss_gradient(rule),
    rule.pairwise,
  )
  y, carried = module.fwd(
    memory,
    operands,
    config=pieces.batches_triton_config(_call(pieces, rule, k, v)),
  )
  carried = jax.tree.map(lambda x: x[:, 0], carried)
  return rearrange(y, "g b n d v -> b (g d) n v"), carry._replace(**carried)


def _marks(marks, q):
  """Bits of each block and row; without marks of them all are used."""
  pieces = _dispatch.kernel_module("mlp_memory.batches")
  fresh, full, used = marks
  bit = lambda value, x: jnp.where(x, value, 0).astype(jnp.int32)
  bits = jnp.zeros(q.shape[:2], jnp.int32)
  if fresh is not None:
    bits += bit(pieces.FRESH, fresh)
  if full is not None:
    bits += bit(pieces.FULL, full)
  return bits + (pieces.USED if used is None else bit(pieces.USED, used))


def _scalars(pieces, coefficients):
  """All scalars of a block side by side, one column for each of the last."""
  decay, carry, write, end = jax.tree.map(lambda x: x[:, 0], coefficients)
  momentum_decay = end.momentum_decay
  rows, columns = write.shape[3:]
  columns += -columns % _ROWS  # those that fill up write nothing
  count = max(-rows % _ROWS + rows, columns)
  fill = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, count - x.shape[3])])
  if momentum_decay is not None:
    momentum_decay = jnp.repeat(momentum_decay[..., None], count, axis=3)
  kinds = {
    "last": end.write,
    "decay": decay,
    "carry": carry,
    "momentum_write": end.momentum_write,
    "momentum_decay": momentum_decay,
  }
  there = {name: fill(x) for name, x in kinds.items() if x is not None}
  places = dict.fromkeys(kinds) | {
    name: columns + i for i, name in enumerate(there)
  }
  write = _fill(jnp.pad(write, [(0, 0)] * 3 + [(0, count - rows), (0, 0)]), 4)
  scalars = jnp.concatenate([write, jnp.stack([*there.values()], -1)], axis=-1)
  return _fill(scalars, 4, _LANES), pieces.Places(**places, end=rows - 1)


def _fill(x, axis, multiple=_ROWS):
  pad = [(0, 0)] * x.ndim
  pad[axis] = (0, -x.shape[axis] % multiple)
  return jnp.pad(x, pad)
