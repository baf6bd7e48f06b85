"""Where tokens go: document starts, compaction, and alignment to a grid.

Masked tokens do not exist, documents start anywhere, and a stream is cut into
calls anywhere, yet segments and windows count real tokens of one document.
These functions move tokens, per row, to where every count is plain.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Bool, Int, PyTree, Shaped


def document_starts(
  segment_ids: Int[Array, "b t"], mask: Bool[Array, "b t"] | None = None
) -> Bool[Array, "b t"]:
  """Marks the tokens at which a new document starts.

  A document starts where the id differs from that of the previous real token
  of the row. The first real token of a row is not marked: whether it goes on
  with an earlier call is for the caller to say.

  Args:
    segment_ids: document number of each token; a reused number after another
      one is a new document.
    mask: False for tokens that do not exist.

  Returns:
    True at the first token of every document but the row's first.

  Example:
    >>> import jax.numpy as jnp
    >>> from memcache_jax import document_starts
    >>> document_starts(jnp.array([[1, 1, 2, 2, 2, 1]])).astype(int).tolist()
    [[0, 0, 1, 0, 0, 1]]
  """
  for name, array in (("segment_ids", segment_ids), ("mask", mask)):
    shape = getattr(array, "shape", None)
    if array is not None and (shape is None or len(shape) != 2):
      raise ValueError(
        f"`{name}` must be an array [b t]: got "
        f"{type(array).__name__ if shape is None else f'shape {shape}'}."
      )
  if mask is None:
    mask = jnp.ones(segment_ids.shape, bool)
  previous = previous_valid(mask)
  before = jnp.take_along_axis(segment_ids, jnp.maximum(previous, 0), axis=1)
  return mask & (previous >= 0) & (segment_ids != before)


def previous_valid(mask: Bool[Array, "b t"]) -> Int[Array, "b t"]:
  """Index of the last valid token before each token, or -1."""
  index = jnp.where(mask, _indices(mask), -1)
  before = jnp.pad(index, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  return _running_max(before)


def age_in_document(
  starts: Bool[Array, "b t"], age_before: Int[Array, " b"]
) -> Int[Array, "b t"]:
  """Number of earlier tokens of the same document, for tokens all valid.

  Args:
    starts: True where a document starts.
    age_before: tokens of the running document before this call.
  """
  index = _indices(starts)
  age_before = sharding.rows_like(age_before, starts)
  first = _running_max(jnp.where(starts, index, -1))
  return jnp.where(first < 0, age_before[:, None] + index, index - first)


class Compaction(NamedTuple):
  """Valid tokens moved to the front of their row; see ``compact``."""

  source: Int[Array, "b t"]  # where the token at this place comes from
  target: Int[Array, "b t"]  # where each token went
  valid: Bool[Array, "b t"]  # which places hold a valid token
  count: Int[Array, " b"]  # valid tokens of the row


def compact(mask: Bool[Array, "b t"]) -> Compaction:
  """Plans to move the valid tokens of each row to its front, in order."""
  source = jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)
  target = jnp.argsort(source, axis=1).astype(jnp.int32)
  count = jnp.sum(mask, axis=1, dtype=jnp.int32)
  valid = _indices(mask) < count[:, None]
  return Compaction(source, target, valid, count)


class Grid(NamedTuple):
  """Tokens of one call laid out on a grid of whole blocks; see ``align``.

  Blocks are numbered from 0, the one that was open before this call.
  """

  source: Int[Array, "b g c"]  # token that lies here; undefined if not valid
  valid: Bool[Array, "b g c"]  # which places hold a token of this call
  target: Int[Array, "b t"]  # place of each token in the flat grid
  placed: Bool[Array, "b t"]  # False: masked, or beyond the last block
  fresh: Bool[Array, "b g"]  # a document starts at this block's first token
  blocks: Int[Array, " b"]  # blocks in use; block 0 always is
  overflow: Bool[Array, " b"]  # the row needs more blocks than there are


def align(
  mask: Bool[Array, "b t"],
  starts: Bool[Array, "b t"],
  position: Int[Array, " b"],
  block: int,
  num_blocks: int,
  ends: Bool[Array, "b t"] | None = None,
) -> Grid:
  """Plans to lay tokens out so that every document starts at a block border.

  Args:
    mask: False for tokens that do not exist; they get no place.
    starts: True at the first token of a document (ignored where masked).
    position: tokens already in the open block, in ``[0, block)``.
    block: tokens per block.
    num_blocks: blocks of the grid; a row that needs more overflows.
    ends: True at tokens after which the next one opens a block, even if the
      block is not full (ignored where masked).

  Returns:
    The plan. Tokens that do not fit have ``placed`` False, and their row
    ``overflow`` True: the caller has to make that visible.
  """
  rows = mask.shape[0]
  starts = starts & mask
  offset, index = _places(mask, starts, position, block, ends)
  placed = mask & (index < num_blocks)
  target = jnp.where(placed, index * block + offset, num_blocks * block)
  token = jnp.broadcast_to(_indices(mask), mask.shape)
  empty = jnp.full_like(mask, -1, jnp.int32, shape=(rows, num_blocks * block))
  source = put_rows(empty, target, token)
  source = source.reshape(rows, num_blocks, block)
  begins = jnp.where(placed & starts, index, num_blocks)
  closed = jnp.full_like(mask, False, shape=(rows, num_blocks))
  fresh = put_rows(closed, begins, jnp.ones_like(starts))
  last = jnp.max(jnp.where(mask, index, 0), axis=1, initial=0)
  return Grid(
    source=jnp.maximum(source, 0),
    valid=source >= 0,
    target=jnp.where(placed, target, 0),
    placed=placed,
    fresh=fresh,
    blocks=jnp.minimum(last + 1, num_blocks),
    overflow=last >= num_blocks,
  )


def blocks_before(
  mask: Bool[Array, "b t"],
  starts: Bool[Array, "b t"],
  position: Int[Array, " b"],
  block: int,
  ends: Bool[Array, "b t"],
) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
  """Counts the blocks of its document that come before each token's own.

  Args:
    mask: as for `align`, like all the others.
    starts: True at the first token of a document.
    position: tokens already in the open block.
    block: tokens per block.
    ends: True at tokens after which the next one opens a block.

  Returns:
    Blocks that this call completed or goes on with, and whether the document
    is the one that was running before the call.
  """
  starts = starts & mask
  index = _places(mask, starts, position, block, ends)[1]
  first = _running_max(jnp.where(starts, index, 0))
  running = jnp.cumsum(starts, axis=1, dtype=jnp.int32) == 0
  return index - first, running


def _places(mask, starts, position, block, ends):
  """Of each token: its offset, modulo the block, and the number of its block.

  Tokens of the row's open run go on from `position`; after a document start,
  or a flagged end, they count from their own first token.
  """
  rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
  first = jnp.where(starts, rank, -1)
  if ends is not None:
    after = jnp.where(ends & mask, rank + 1, -1)
    after = jnp.pad(after, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    first = jnp.maximum(first, after)
  first = _running_max(first)
  offset = jnp.where(first < 0, position[:, None] + rank, rank - first)
  offset = offset % block
  opens = mask & (offset == 0)
  index = jnp.cumsum(opens, axis=1, dtype=jnp.int32)
  return offset, index - (position == 0).astype(jnp.int32)[:, None]


def take_tokens(
  tree: PyTree[Shaped[Array, "b t ..."]], index: Int[Array, "b ..."]
) -> PyTree[Shaped[Array, "b ..."]]:
  """Gathers tokens by per-row index; index axes replace the token axis."""

  # Mapped over rows, so that rows spread over devices stay where they are.
  def take(x):
    rows = sharding.rows_like(index, x)
    return jax.vmap(lambda x, index: x[index])(
      sharding.rows_like(x, rows), rows
    )

  return jax.tree.map(take, tree)


def put_rows(
  x: Shaped[Array, "b t ..."],
  index: Int[Array, "b s"],
  new: Shaped[Array, "b s ..."],
) -> Shaped[Array, "b t ..."]:
  """Sets places of each row; an index out of range is dropped."""
  index = sharding.rows_like(index, new)
  x = sharding.rows_like(x, index)
  put = jax.vmap(lambda x, index, new: x.at[index].set(new, mode="drop"))
  return put(x, index, sharding.rows_like(new, index))


def select_rows(
  rows: Bool[Array, " b"],
  yes: PyTree[Shaped[Array, "b ..."]],
  no: PyTree[Shaped[Array, "b ..."]],
) -> PyTree[Shaped[Array, "b ..."]]:
  """Takes `yes` in the rows that are True, else `no`."""

  def select(a, b):
    # Some may come from nothing, and be nowhere yet.
    a = sharding.rows_like(a, b)
    b = sharding.rows_like(b, a)
    which = sharding.rows_like(rows, a)
    return jnp.where(which.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)

  return jax.tree.map(select, yes, no)


def zero_masked(
  tree: PyTree[Shaped[Array, "b t ..."]], mask: Bool[Array, "b t"]
) -> PyTree[Shaped[Array, "b t ..."]]:
  """Sets masked tokens to 0 (False)."""

  def zero(x):
    keep = mask.reshape(mask.shape + (1,) * (x.ndim - 2))
    return jnp.where(keep, x, jnp.zeros((), x.dtype))

  return jax.tree.map(zero, tree)


def _indices(x: Shaped[Array, "b t"]) -> Int[Array, "1 t"]:
  return jnp.arange(x.shape[1], dtype=jnp.int32)[None]


def _running_max(x: Int[Array, "b t"]) -> Int[Array, "b t"]:
  return jax.lax.cummax(x, axis=1)
