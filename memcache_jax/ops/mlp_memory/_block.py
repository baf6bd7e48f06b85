"""One inner batch: gradients at its start, reads in between, its end.

The gradient of token i in an affine map is the outer product of the map's
input X_i and of the derivative D_i with respect to its output, so a map of
the weights after row r is, with the coefficients of `_coefficients`,

  A_r (x W_0) + B_r (x S_0) - ((x X^T) * C_r) D

and no weight gradient is ever built.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, Float, Params
from memcache_jax.ops.mlp_memory._architecture import apply_affine, bias_name
from memcache_jax.ops.mlp_memory._coefficients import Coefficients
from memcache_jax.ops.mlp_memory._state import Rule


class Written(NamedTuple):
  """Tokens as they are written: columns e of a block."""

  k: Float[Array, "*b n e k"]
  v: Float[Array, "*b n e v"]
  gates: dict[str, Float[Array, "*b n e"]]


class Blocks(NamedTuple):
  """Inner batches, all of them [g b ...] or one [b ...].

  Attributes:
    q: queries.
    written: the batch's tokens, after those of the window before it.
    coefficients: see there.
    fresh: rows in which a document starts; None for none.
    full: rows in which the batch ends with this block; None: all, and they
      begin with it, too.
    used: rows with any token; None for all.
    mix: weights of stored memories and of the online one; see `Mix`.
  """

  q: Float[Array, "*b n c k"]
  written: Written
  coefficients: Coefficients
  fresh: Bool[Array, "*b"] | None = None
  full: Bool[Array, "*b"] | None = None
  used: Bool[Array, "*b"] | None = None
  mix: tuple[Float[Array, "*b n c s"], Float[Array, "*b n c"]] | None = None


class Carry(NamedTuple):
  """The part of the state that changes from block to block.

  `start` and `decay` are None where every block is a whole inner batch.
  """

  theta: Params
  momentum: Params | None
  start: Params | None
  decay: Float[Array, "b n"] | None


def run_block(
  rule: Rule,
  static: Params,
  initial: Params,
  memories: Params | None,
  carry: Carry,
  block: Blocks,
) -> tuple[Carry, Float[Array, "b n c v"]]:
  """Writes and reads one inner batch, or the part of it in this call.

  Args:
    rule: the memory.
    static: parameters that are not written, [1 n 1 v].
    initial: weights a document starts with, [b n ...].
    memories: stored weights [b n s ...] where reads are mixed.
    carry: what the block before left.
    block: this one's tokens.
  """
  if block.fresh is not None:
    carry = _reset(block.fresh, carry, initial)
  start = carry.theta if carry.start is None else carry.start
  scale = rule.closing.scale(start)
  weights = start
  if scale is not None:
    weights = {name: _outer(scale[name], x) * x for name, x in start.items()}
  x, d = _gradients(rule, static, weights, block.written, block.q.dtype)
  base = start if rule.pairwise else carry.theta
  y = _read(rule, static, memories, base, carry.momentum, scale, x, d, block)
  return _end(rule, carry, start, base, x, d, block), y


def _gradients(rule, static, weights, written, dtype):
  """Inputs X of every map, and derivatives D of the loss after it."""
  maps = rule.architecture.affine_maps(written.k.shape[-1], written.v.shape[-1])
  k, v = written.k.astype(jnp.float32), written.v.astype(jnp.float32)
  zeros = {
    name: jnp.zeros((*k.shape[:-1], size.out_dim), jnp.float32)
    for name, size in maps.items()
  }

  def predict(shift):
    inputs = {}

    def affine(name, x):
      inputs[name] = x
      return apply_affine(weights, name, x, dtype) + shift[name]

    return rule.architecture.forward(affine, static, k), inputs

  output, pull, inputs = jax.vjp(predict, zeros, has_aux=True)
  (derivatives,) = pull(rule.loss.gradient(output, v, written.gates))
  return inputs, derivatives


def _read(rule, static, memories, base, momentum, scale, x, d, block):
  dtype = block.q.dtype
  decay, carry, write, _, _ = block.coefficients

  def affine(name, z):
    out = numerics.matmul("bnci,bnio->bnco", z, base[name], dtype=dtype)
    if decay is not None:
      out = decay[..., None] * out
    if carry is not None:
      kept = numerics.matmul("bnci,bnio->bnco", z, momentum[name], dtype=dtype)
      out = out + carry[..., None] * kept
    bias = bias_name(name)
    if write is not None:
      scores = numerics.matmul("bnci,bnei->bnce", z, x[name], dtype=dtype)
      if bias in base:  # its input is 1
        scores = scores + (
          1.0 if scale is None else _outer(scale[bias] / scale[name], scores)
        )
      out = out - numerics.matmul(
        "bnce,bneo->bnco", scores * write, d[name], dtype=dtype
      )
    if scale is not None:
      out = _outer(scale[name], out) * out
    if bias in base:
      shift = _rows(decay, base[bias])
      if carry is not None:
        shift = shift + _rows(carry, momentum[bias])
      out = out + (
        shift if scale is None else _outer(scale[bias], shift) * shift
      )
    if memories is None:
      return out
    return block.mix[1][..., None] * out + _mix(
      memories, name, z, block.mix[0], dtype
    )

  return rule.architecture.forward(affine, static, block.q.astype(jnp.float32))


def _mix(memories, name, z, weights, dtype):
  """The gated sum of one map of the stored memories; one matmul."""
  wide = weights[..., None] * z[..., None, :]
  out = numerics.matmul("bncsi,bnsio->bnco", wide, memories[name], dtype=dtype)
  bias = memories.get(bias_name(name))
  if bias is not None:
    out = out + jnp.einsum("bncs,bnso->bnco", weights, bias)
  return out


def _end(rule, carry, start, base, x, d, block):
  """The state after the block."""
  dtype = block.q.dtype
  decay, kept, write, momentum_decay, momentum_write = block.coefficients
  last = lambda row: None if row is None else row[..., -1]

  def written(weights):
    out = {}
    for name in x:
      step = weights[..., None] * d[name]
      out[name] = numerics.matmul("bnei,bneo->bnio", x[name], step, dtype=dtype)
      if bias_name(name) in base:
        out[bias_name(name)] = jnp.sum(step, axis=2)
    return out

  theta = {name: _times(last(decay), w) for name, w in base.items()}
  if kept is not None:
    for name, w in carry.momentum.items():
      theta[name] = theta[name] + _times(last(kept), w)
  if write is not None:
    for name, w in written(write[..., -1, :]).items():
      theta[name] = theta[name] - w
  momentum = carry.momentum
  if momentum is not None:
    new = written(momentum_write)
    momentum = {
      name: _times(momentum_decay, w) - new[name]
      for name, w in momentum.items()
    }
  if block.used is not None and rule.pairwise:
    theta = _select(block.used, theta, carry.theta)
  return _close(rule, carry, start, theta, momentum, last(decay), block.full)


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
  theta, momentum = _select(full, closed, (theta, momentum))
  if decay is not None:
    decay = jnp.where(full[:, None], 1.0, decay)
  return Carry(theta, momentum, _select(full, theta, start), decay)


def _reset(fresh, carry, initial):
  new = Carry(
    theta=initial,
    momentum=jax.tree.map(jnp.zeros_like, carry.momentum),
    start=initial,
    decay=None if carry.decay is None else jnp.ones_like(carry.decay),
  )
  return _select(fresh, new, carry)


def _select(rows, yes, no):
  def select(a, b):
    return jnp.where(rows.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)

  return jax.tree.map(select, yes, no)


def _outer(scalar, like):
  return scalar.reshape(scalar.shape + (1,) * (like.ndim - scalar.ndim))


def _times(scalar, x):
  return x if scalar is None else _outer(scalar, x) * x


def _rows(rows, bias):
  """[b n c] or None for 1, times [b n o], to [b n c o]."""
  bias = bias[:, :, None]
  return bias if rows is None else rows[..., None] * bias
