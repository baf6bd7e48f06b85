"""Tiles of arrays on a GPU, where every side is a power of two.

What is wider than an array is masked: loads find 0 there, stores leave it out.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


class Span(NamedTuple):
  """`size` places from `start` on; none from `end` on, if that is given."""

  start: Any
  size: int
  end: Any = None

  def places(self):
    return self.start + jax.lax.iota(jnp.int32, self.size)


class Places(NamedTuple):
  """Rows, each at a number of its own; none where it is negative.

  Attributes:
    at: the numbers [c].
  """

  at: Any

  @property
  def size(self):
    return self.at.shape[0]


def whole(width: int) -> Span:
  """All of a width; as many places as a side of a product has at least."""
  size = _side(width)
  return Span(0, size, None if width == size else width)


def _side(width: int) -> int:
  return max(pl.next_power_of_2(width), 16)


def part(index, size: int, width: int) -> Span:
  """Part `index` of a width that is cut into such sizes."""
  return Span(index * size, size, width if width % size else None)


def load(ref, *index):
  """A tile at spans, the first one perhaps `Places`, or at single numbers."""
  here, mask = _at(ref, index)
  other = None if mask is None else jnp.zeros((), ref.dtype)
  return plgpu.load(here, mask=mask, other=other)


def store(ref, value, *index):
  here, mask = _at(ref, index)
  plgpu.store(here, value.astype(ref.dtype), mask=mask)


def _at(ref, index):
  sides = [x for x in index if isinstance(x, (Span, Places))]
  shape = [side.size for side in sides]

  def along(side, numbers):
    others = [i for i, x in enumerate(sides) if x is not side]
    return jnp.broadcast_to(jnp.expand_dims(numbers, others), shape)

  mask = None
  for side in sides:
    inside = _inside(side)
    if inside is not None:
      inside = along(side, inside)
      mask = inside if mask is None else mask & inside
  gathers = any(isinstance(x, Places) for x in sides)

  def indices(x, count):
    if isinstance(x, Places):
      # Behind the last row, where a simulation stores nothing, either.
      return along(x, jnp.where(x.at < 0, count, x.at))
    if isinstance(x, Span):
      # Slices and numbers of rows do not go together.
      return along(x, x.places()) if gathers else pl.ds(x.start, x.size)
    return jnp.asarray(x, jnp.int32)

  return ref.at[tuple(map(indices, index, ref.shape))], mask


def _inside(side):
  """Which places of a side exist; None where all do."""
  if isinstance(side, Places):
    return side.at >= 0
  return None if side.end is None else side.places() < side.end


def dot(a, b, contract, interpret):
  """Matmul of the given axes, in float32."""
  precision: Any = None
  if a.dtype == jnp.float32:
    # Three products of what fits into the tensor cores.
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    if interpret:
      precision = jax.lax.Precision.HIGHEST
  return jax.lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def wait(interpret):
  """Until all threads of a program are here, and see what others stored."""
  if not interpret:  # a simulation has one
    plgpu.debug_barrier()


def along(body, sums, width: int, size: int):
  """Adds to sums what a body makes of each piece of a width.

  Registers would not hold all operands of a product that goes along all of it.
  """
  size = min(size, whole(width).size)
  add = lambda i, sums: jax.tree.map(jnp.add, sums, body(part(i, size, width)))
  return jax.lax.fori_loop(0, pl.cdiv(width, size), add, sums)


# Grids are (i, j, heads n, rows b), of which i and j are the kernel's own.


def of_head(x) -> pl.BlockSpec:
  """What a kernel takes of [b t n width] or of states [b s n k v]: one head."""
  widths = (pl.next_power_of_2(width) for width in x.shape[3:])
  shape = (None, x.shape[1], None, *widths)
  zeros = (0,) * (x.ndim - 3)
  return pl.BlockSpec(shape, lambda i, j, n, b: (b, 0, n, *zeros))


def numbers_of_head(x) -> pl.BlockSpec:
  """The same of [b n kinds t]."""
  shape = (None, None, *x.shape[2:])
  return pl.BlockSpec(shape, lambda i, j, n, b: (b, n, 0, 0))


def parts_of_head(of, x) -> pl.BlockSpec:
  """The same of [p ...], where program i has a part of its own."""
  spec = of(jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
  return pl.BlockSpec(
    (None, *spec.block_shape),
    lambda i, j, n, b: (i, *spec.index_map(i, j, n, b)),
  )


def blocks_of_head(x) -> pl.BlockSpec:
  """The same of [g b n ...], all blocks g."""
  sides = map(_side, x.shape[3:])
  zeros = (0,) * (x.ndim - 3)
  return pl.BlockSpec(
    (x.shape[0], None, None, *sides), lambda i, j, n, b: (0, b, n, *zeros)
  )


_SPECS: dict[str, Callable[[Any], pl.BlockSpec]] = {
  "blocks": blocks_of_head,
  "scalars": numbers_of_head,
  "numbers": functools.partial(parts_of_head, numbers_of_head),
  "parts": functools.partial(parts_of_head, of_head),
}


def call(kernel, name, grid, arrays, outputs, *, config, interpret, warps=None):
  """Runs a kernel of two dicts of references: what it reads, what it writes.

  Args:
    kernel: of both.
    name: of the kernel.
    grid: see above.
    arrays: what it reads, by name; a program has what is of its head, as
      `_SPECS` says of some names, `of_head` of all others.
    outputs: shapes of what it writes, likewise.
    config: has `warps` and `stages`.
    interpret: run without a GPU.
    warps: of a program, where it is not those of the config.
  """
  spec = lambda path, x: _SPECS.get(path[0].key, of_head)(x)
  specs = functools.partial(jax.tree_util.tree_map_with_path, spec)
  return pl.pallas_call(
    kernel,
    name=name,
    grid=grid,
    in_specs=[specs(arrays)],
    out_specs=specs(outputs),
    out_shape=outputs,
    compiler_params=plgpu.CompilerParams(
      num_warps=warps or config.warps, num_stages=config.stages
    ),
    interpret=interpret,
  )(arrays)
