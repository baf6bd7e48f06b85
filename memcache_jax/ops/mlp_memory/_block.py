"""One inner batch: gradients at its start, reads in between, its end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import sharding, token_layout
from memcache_jax.array_typing import Array, Bool, Float, Params
from memcache_jax.ops.mlp_memory._architecture import apply_affine
from memcache_jax.ops.mlp_memory._coefficients import (
  Coefficients,
  Rows,
  unroll,
)
from memcache_jax.ops.mlp_memory._pieces import (
  read_pieces,
  read_start,
  write_pieces,
)
from memcache_jax.ops.mlp_memory._state import Rule


class Written(NamedTuple):
  """Tokens as they are written: columns of a block."""

  k: Float[Array, "*b n columns k"]
  v: Float[Array, "*b n columns v"]
  gates: dict[str, Float[Array, "*b n columns"]]


class Blocks(NamedTuple):
  """Inner batches [g b ...], and the pieces [g p b ...] in which they are read.

  Attributes:
    written: the batch's tokens, after those of the window before it.
    coefficients: see there, of pieces, or what they are unrolled from.
    q: queries, of pieces.
    mix: weights of stored memories and of the online one, see `Mix`, of
      pieces.
    fresh: rows in which a document starts; None for none.
    full: rows in which the batch ends with this block; None: all, and they
      begin with it, too.
    used: rows with any token; None for all.
  """

  written: Written
  coefficients: Coefficients | Rows
  q: Float[Array, "*g p b n d k"]
  mix: tuple[Float[Array, "*p b n d s"], Float[Array, "*p b n d"]] | None = None
  fresh: Bool[Array, "*g b"] | None = None
  full: Bool[Array, "*g b"] | None = None
  used: Bool[Array, "*g b"] | None = None


class Carry(NamedTuple):
  """The part of the state that changes from block to block.

  `start` and `decay` are None where every block is a whole inner batch.
  `momentum` is None where there is none, in the memory or so far.
  """

  theta: Params
  momentum: Params | None
  start: Params | None
  decay: Float[Array, "b n"] | None


def begin(rule: Rule, initial: Params) -> Carry:
  """Before the first block of a new sequence."""
  momentum = None
  if rule.has_momentum:
    momentum = jax.tree.map(jnp.zeros_like, initial)
  return Carry(initial, momentum, None, None)


def begin_alike(initial: Params) -> Carry:
  """The same where a block is run by itself.

  Nothing is multiplied by a momentum of zeros, and one copy [1 n ...] of the
  weights, which all rows begin with, is the factor of all rows' tokens.
  """

  def one(x):
    return x if sharding.spec_of(x)[0] is not None else x[:1]

  return Carry(jax.tree.map(one, initial), None, None, None)


def run_block(
  rule: Rule,
  static: Params,
  initial: Params,
  memories: Params | None,
  carry: Carry,
  block: Blocks,
) -> tuple[Carry, Float[Array, "p b n d v"]]:
  """Writes and reads one inner batch, or the part of it in this call.

  Args:
    rule: the memory.
    static: parameters that are not written, [1 n 1 v].
    initial: weights a document starts with, [b n ...].
    memories: stored weights [b n s ...] where reads are mixed.
    carry: what the block before left.
    block: this one's tokens.
  """
  coefficients = unroll(block.coefficients)
  if block.fresh is not None:
    carry = _reset(block.fresh, carry, initial)
  start = carry.theta if carry.start is None else carry.start
  weights = rule.closing.as_read(start, start)
  x, d = _gradients(rule, static, weights, block.written, block.q.dtype)
  base = start if rule.pairwise else carry.theta
  (theta, momentum), pieces = write_pieces(
    rule, (base, carry.momentum), x, d, block, coefficients
  )
  if rule.delayed:
    pieces = read_start(pieces, start)
  scale = rule.closing.scale(start)
  y = read_pieces(rule, static, memories, scale, pieces)
  if block.used is not None and rule.pairwise:
    theta = token_layout.select_rows(block.used, theta, carry.theta)
  decay = coefficients.end.decay
  decay = None if decay is None else jnp.prod(decay, axis=0)
  return _close(rule, carry, start, theta, momentum, decay, block.full), y


def _gradients(rule, static, weights, written, dtype):
  """Inputs X of every map, and D, which descends the loss, after it."""
  maps = rule.architecture.affine_maps(written.k.shape[-1], written.v.shape[-1])
  k, v = written.k.astype(jnp.float32), written.v.astype(jnp.float32)
  zeros = {
    name: sharding.zeros_at_tokens(k, size.out_dim)
    for name, size in maps.items()
  }

  def predict(shift):
    inputs = {}

    def affine(name, x):
      inputs[name] = x
      return apply_affine(weights, name, x, dtype) + shift[name]

    return rule.architecture.forward(affine, static, k), inputs

  output, pull, inputs = jax.vjp(predict, zeros, has_aux=True)
  # The sign is taken here, of the least there is to change the sign of.
  (descent,) = pull(-rule.loss.gradient(output, v, written.gates))
  return inputs, descent


def _close(rule, carry, start, theta, momentum, decay, full):
  if not rule.closing.tracks_decay:
    decay = None
  elif decay is None:
    decay = jnp.ones(next(iter(theta.values())).shape[:2], jnp.float32)
  if decay is not None and carry.decay is not None:
    decay = carry.decay * decay
  closed = rule.closing.close(start, theta, momentum, decay)
  if carry.start is None:
    return Carry(closed[0], closed[1], None, None)
  if full is None:  # an open batch, in every row
    return Carry(theta, momentum, start, decay)
  theta, momentum = token_layout.select_rows(full, closed, (theta, momentum))
  if decay is not None:
    decay = jnp.where(full[:, None], 1.0, decay)
  return Carry(
    theta, momentum, token_layout.select_rows(full, theta, start), decay
  )


def _reset(fresh, carry, initial):
  new = Carry(
    theta=initial,
    momentum=jax.tree.map(jnp.zeros_like, carry.momentum),
    start=initial,
    decay=None if carry.decay is None else jnp.ones_like(carry.decay),
  )
  return token_layout.select_rows(fresh, new, carry)
