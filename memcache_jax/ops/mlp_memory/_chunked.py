"""MLP memories by inner batches: matmuls inside, a scan across.

Nothing as large as tokens x parameters is built, and a training step keeps
the parameters at the start of inner batches only; see `run_blocks`.
"""

import functools
from collections.abc import Callable

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from memcache_jax import sharding, token_layout
from memcache_jax.array_typing import Array, Bool, Float, Params
from memcache_jax.ops.mlp_memory import _grid
from memcache_jax.ops.mlp_memory._block import (
  Blocks,
  Carry,
  begin,
  begin_alike,
  run_block,
)
from memcache_jax.ops.mlp_memory._grid import Inputs
from memcache_jax.ops.mlp_memory._pieces import scan_or_call
from memcache_jax.ops.mlp_memory._state import MLPMemoryState, Rule

# Inner batches of a new sequence, at most, of which the first is done apart.
_FEW = 2


def run_blocks(
  rule: Rule,
  static: Params,
  initial: Params,
  memories: Params | None,
  carry: Carry | None,
  blocks: Blocks,
) -> tuple[Carry, Float[Array, "b t n v"]]:
  """Runs blocks, from the initial weights where there is no carry yet.

  A backward pass runs every block forward again.

  It keeps the parameters at the start of every block, and nothing else per
  block. Where even that is much, only those at the start of groups of blocks
  (and, in turn, of the blocks of one group) are kept: about 2 sqrt(g) sets for
  g blocks, for one more forward pass. Policies of `jax.checkpoint` know these
  by the name "batch_starts".
  """

  @jax.checkpoint
  def run(carry, block):
    return run_block(rule, static, initial, memories, carry, block)

  def from_kept(run):
    name = lambda x: checkpoint_name(x, "batch_starts")
    return lambda carry, inputs: run(jax.tree.map(name, carry), inputs)

  count, pieces = blocks.q.shape[:2]
  reads = []
  if carry is None and count <= _FEW and pieces == 1:
    block = jax.tree.map(lambda x: x[0], blocks)
    blocks = jax.tree.map(lambda x: x[1:], blocks)
    now, y = run(begin_alike(initial), block)
    reads.append(y[None])
    count -= 1
  else:
    now = begin(rule, initial) if carry is None else carry
  if count == 0:
    return now, _in_order(reads)
  group = _group_size(count)
  kept = count * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(now))
  if group == 1 or kept <= rule.max_kept_bytes:
    now, y = scan_or_call(from_kept(run), now, blocks)
  else:
    blocks = jax.tree.map(
      lambda x: x.reshape(count // group, group, *x.shape[1:]), blocks
    )

    @jax.checkpoint
    def run_group(carry, group):
      return jax.lax.scan(run, carry, group)

    now, y = jax.lax.scan(from_kept(run_group), now, blocks)
    y = y.reshape(count, *y.shape[2:])
  return now, _in_order([*reads, y])


def _in_order(reads):
  """Reads of blocks [g p b n d v], some after others, as those of tokens."""
  y = reads[0] if len(reads) == 1 else jnp.concatenate(reads)
  return einops.rearrange(y, "g p b n d v -> b (g p d) n v")


def mlp_memory(
  rule: Rule,
  inputs: Inputs,
  static: Params,
  memories: Params | None,
  initial: MLPMemoryState,
  state: MLPMemoryState | None,
  mask: Bool[Array, "b t"] | None,
  starts: Bool[Array, "b t"] | None,
  max_unaligned_starts: int | None,
  run_all: Callable[..., tuple[Carry, Array]] = run_blocks,
) -> tuple[Float[Array, "b t n v"], MLPMemoryState]:
  """`mlp_memory`, one inner batch at a time; masked tokens are zeros.

  `run_all` is what runs the blocks: `run_blocks`, or a kernel in its place.
  """
  if memories is not None:
    memories = {name: jnp.swapaxes(x, 1, 2) for name, x in memories.items()}
  run = functools.partial(run_all, rule, static, initial.theta, memories)
  t = inputs.q.shape[1]
  if t == 0:
    return jnp.zeros_like(inputs.v), initial if state is None else state
  if state is None and mask is None and starts is None:
    return _fresh(rule, inputs, initial, run)
  open_tokens = 0 if state is None else rule.inner_batch - 1
  state = initial if state is None else state
  if t == 1:
    return _single(rule, inputs, state, mask, starts, run)
  num_blocks = -(-(open_tokens + t) // rule.inner_batch)
  if starts is not None:
    if max_unaligned_starts is None:
      max_unaligned_starts = _count_unaligned(rule, state, mask, starts)
    # A start inside a block of the grid cuts it in two.
    num_blocks += min(max_unaligned_starts, t)
  return _aligned(rule, inputs, state, mask, starts, num_blocks, run)


def _fresh(rule, inputs, state, run):
  t = inputs.v.shape[1]
  count = t // rule.inner_batch
  carry = None
  reads = []
  if count:
    blocks = _grid.fresh(rule, inputs, 0, rule.inner_batch, count)
    carry, y = run(carry, blocks)
    reads.append(y)
  carry = begin(rule, state.theta) if carry is None else carry
  carry = carry._replace(start=carry.theta, decay=state.decay)
  done = count * rule.inner_batch
  for size in _grid.rest(rule, inputs):
    carry, y = run(carry, _grid.fresh(rule, inputs, done, size))
    reads.append(y)
    done += size
  y = reads[0] if len(reads) == 1 else jnp.concatenate(reads, axis=1)
  tail = _grid.fresh_tail(rule, inputs)
  return y.astype(inputs.v.dtype), _state(carry, tail, state.position + t)


def _single(rule, inputs, state, mask, starts, run):
  blocks, tail, position = _grid.single(rule, inputs, state, mask, starts)
  carry, y = run(_carry(state), blocks)
  if mask is not None:
    y = jnp.where(mask[..., None, None], y, 0.0)
  return y.astype(inputs.v.dtype), _state(carry, tail, position)


def _aligned(rule, inputs, state, mask, starts, num_blocks, run):
  b, t = inputs.q.shape[:2]
  mask = jnp.ones((b, t), bool) if mask is None else mask
  starts = jnp.zeros((b, t), bool) if starts is None else starts
  mask, starts = sharding.rows_like((mask, starts), inputs.q)
  plan = _grid.aligned(rule, inputs, state, mask, starts, num_blocks)
  carry, y = run(_carry(state), plan.blocks)
  y = token_layout.take_tokens(y, plan.target)
  y = jnp.where(mask[..., None, None], y, 0.0)
  state = _state(carry, plan.tail, plan.position)

  def spoil(x):  # rows for which there was no room
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    bad = plan.overflow.reshape((-1,) + (1,) * (x.ndim - 1))
    return jnp.where(bad, jnp.nan, x)

  y, state = jax.tree.map(spoil, (y, state))
  return y.astype(inputs.v.dtype), state


def _carry(state):
  return Carry(state.theta, state.momentum, state.start, state.decay)


def _state(carry, tail, position):
  return MLPMemoryState(
    carry.theta, carry.start, carry.momentum, carry.decay, tail, position
  )


def _group_size(count: int) -> int:
  """The divisor of the number of blocks nearest below its square root."""
  return max(d for d in range(1, int(count**0.5) + 1) if count % d == 0)


def _count_unaligned(rule, state, mask, starts):
  arrays = (starts, mask, state.position)
  if any(isinstance(x, Tracer) for x in arrays):
    raise ValueError(
      "`max_unaligned_starts` must be given with `starts` under jax.jit, "
      "where starts cannot be counted: got None. It is the largest number of "
      "documents per row that begin inside an inner batch "
      f"(inner_batch={rule.inner_batch}); 0 if all begin on its borders."
    )
  starts = np.asarray(starts)
  mask = np.ones_like(starts) if mask is None else np.asarray(mask)
  place = np.cumsum(mask, axis=1) - 1 + np.asarray(state.position)[:, None]
  unaligned = starts & mask & (place % rule.inner_batch != 0)
  return int(unaligned.sum(axis=1).max(initial=0))
