"""Reading a block in pieces: one by one inside, as weights in between.

The gradient of token i in an affine map is the outer product of the map's
input X_i and of the derivative of the loss with respect to its output, of which
D_i is the negative, so a map of the weights after row r of a piece is, with the
coefficients of `_coefficients`,

  A_r (x W_0) + B_r (x S_0) + ((x X^T) * C_r) D

where W_0 and S_0 are the weights and the momentum before the piece. No weight
gradient of a token is ever built.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Float, Params, Shaped
from memcache_jax.ops.mlp_memory._architecture import bias_name
from memcache_jax.ops.mlp_memory._coefficients import Coefficients
from memcache_jax.ops.mlp_memory._product import product
from memcache_jax.ops.mlp_memory._state import Rule


def num_pieces(rule: Rule, size: int, key_dim: int, value_dim: int) -> int:
  """In how many equal pieces the tokens of a block are read.

  A token reads the writes of its own piece one by one, and those before it as
  weights. Up to some number of tokens, the one is less work, then the other.
  It changes nothing but rounding. Pieces are equal, so that a block without a
  fitting divisor (a large prime) is read as one, with scores of all its tokens
  by all of them, however many these are.

  Args:
    rule: the memory.
    size: tokens of the block.
    key_dim: width of keys.
    value_dim: width of values.
  """
  if rule.pairwise or not rule.reads_own_batch:
    return 1
  most = max(
    4 * x.in_dim * x.out_dim // (x.in_dim + x.out_dim)
    for x in rule.architecture.affine_maps(key_dim, value_dim).values()
  )
  counts = [
    count
    for count in range(1, size + 1)
    if size % count == 0 and most // 4 <= size // count <= most
  ]
  return min(counts, default=1)


def to_pieces(
  x: Shaped[Array, "..."], count: int, axis: int
) -> Shaped[Array, "..."]:
  """Cuts [*g b n c ...] into pieces [*g p b n d ...]; `axis` is that of c."""
  size = x.shape[axis] // count
  x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x, axis, axis - 2)


def _columns(
  x: Shaped[Array, "b n e i"], count: int, before: int
) -> Shaped[Array, "p b n d i"]:
  """Cuts columns alike; pieces begin with the `before` columns before them."""
  if count == 1:
    return x[None]
  pieces = to_pieces(x[:, :, before:], count, 2)
  if not before:
    return pieces
  size = pieces.shape[3]
  index = jnp.arange(count)[:, None] * size + jnp.arange(before)[None]
  return jnp.concatenate(
    [jnp.moveaxis(jnp.take(x, index, axis=2), 2, 0), pieces], axis=3
  )


class Pieces(NamedTuple):
  """The tokens of the pieces of a block, and what they read.

  Attributes:
    q: queries.
    coefficients: of these tokens.
    mix: weights of stored memories and of the online one, or None.
    theta: weights before the piece.
    momentum: momentum before it, where reads need it and there is any.
    x: inputs of every map, of the columns of the piece.
    d: the negative derivatives after it, likewise.
  """

  q: Float[Array, "p b n d k"]
  coefficients: Coefficients
  mix: tuple[Float[Array, "p b n d s"], Float[Array, "p b n d"]] | None
  theta: Params
  momentum: Params | None
  x: Params
  d: Params


def write_pieces(
  rule: Rule,
  now: tuple[Params, Params | None],
  x: Params,
  d: Params,
  block,
  coefficients: Coefficients,
) -> tuple[tuple[Params, Params | None], Pieces]:
  """Takes the steps of a block, piece by piece.

  Args:
    rule: the memory.
    now: weights and momentum before the block.
    x: inputs of every map, of all columns.
    d: the negative derivatives after it.
    block: the tokens.
    coefficients: of the tokens.

  Returns:
    Weights and momentum after the block, and what is to be read.
  """
  columns = lambda x: _columns(x, block.q.shape[0], rule.tail)
  x, d = jax.tree.map(columns, (x, d))

  # All sums at once, so that the scan has no products, forwards or backwards.
  sums = jax.vmap(
    lambda end, x, d: _step_sums(now[0], end, x, d, block.q.dtype)
  )(coefficients.end, x, d)

  def step(now, piece):
    theta, momentum = now
    read = theta, None if coefficients.carry is None else momentum
    return _write(now, *piece), read

  now, (theta, momentum) = scan_or_call(step, now, (coefficients.end, sums))
  return now, Pieces(block.q, coefficients, block.mix, theta, momentum, x, d)


def read_start(pieces: Pieces, start: Params) -> Pieces:
  """The same queries of the weights from the start of the inner batch."""
  return pieces._replace(
    coefficients=Coefficients(),
    theta={name: x[None] for name, x in start.items()},
    momentum=None,
    x={},
    d={},
  )


def scan_or_call(step, carry, inputs):
  """`jax.lax.scan`, without the loop where there is one step."""
  if jax.tree.leaves(inputs)[0].shape[0] > 1:
    return jax.lax.scan(step, carry, inputs)
  carry, out = step(carry, jax.tree.map(lambda x: x[0], inputs))
  return carry, jax.tree.map(lambda x: x[None], out)


def read_pieces(
  rule: Rule,
  static: Params,
  memories: Params | None,
  scale: dict[str, Float[Array, "#b n"]] | None,
  pieces: Pieces,
) -> Float[Array, "p b n d v"]:
  """Reads all pieces of a block at once.

  Args:
    rule: the memory.
    static: parameters that are not written.
    memories: stored weights where reads are mixed.
    scale: factors from stored parameters to weights; None for 1.
    pieces: what `write_pieces` returned.
  """
  return jax.vmap(lambda piece: _read(rule, static, memories, scale, piece))(
    pieces
  )


def _read(rule, static, memories, scale, piece):
  dtype = piece.q.dtype
  decay, carry, write = piece.coefficients[:3]
  base, momentum = piece.theta, piece.momentum

  def affine(name, z):
    bias = bias_name(name)
    out = _product(decay, z, base[name], carry, momentum, name, dtype)
    if write is not None:
      x, d = piece.x[name], piece.d[name]
      scores = numerics.matmul("bnci,bnei->bnce", z, x, dtype=dtype)
      if bias in base:  # its input is 1
        scores = scores + (
          1.0 if scale is None else _outer(scale[bias] / scale[name], scores)
        )
      out = out + numerics.matmul(
        "bnce,bneo->bnco", scores * write, d, dtype=dtype
      )
    if scale is not None:
      out = _outer(scale[name], out) * out
    if bias in base:
      shift = _rows(decay, base[bias])
      if momentum is not None:
        shift = shift + _rows(carry, momentum[bias])
      out = out + (
        shift if scale is None else _outer(scale[bias], shift) * shift
      )
    if memories is None:
      return out
    mix, own = piece.mix
    return own[..., None] * out + _mix(memories, name, z, mix, dtype)

  return rule.architecture.forward(affine, static, piece.q.astype(jnp.float32))


def _product(decay, z, weight, carry, momentum, name, dtype):
  """The part of a map that was there before: weights, and their momentum."""
  out = product(z, weight, dtype)
  out = out if decay is None else numerics.scale_rows(out, decay)
  if momentum is None:
    return out
  return out + numerics.scale_rows(product(z, momentum[name], dtype), carry)


def _mix(memories, name, z, weights, dtype):
  """The gated sum of one map of the stored memories; one matmul."""
  wide = weights[..., None] * z[..., None, :]
  if z.shape[-2] == 1:
    # In the order in which they lie in a state, which is then not copied.
    stored = jnp.swapaxes(memories[name], 1, 2)
    wide = jnp.swapaxes(wide[:, :, 0], 1, 2)
    out = numerics.matmul("bsni,bsnio->bsno", wide, stored, dtype=dtype)
    out = jnp.sum(out, axis=1)[:, :, None]
  else:
    out = numerics.matmul(
      "bncsi,bnsio->bnco", wide, memories[name], dtype=dtype
    )
  bias = memories.get(bias_name(name))
  if bias is not None:
    out = out + jnp.einsum("bncs,bnso->bnco", weights, bias)
  return out


def _write(now, end, sums):
  """Weights and momentum after a piece, of the sums of its steps."""
  theta, momentum = now
  new = {name: _times(end.decay, w) for name, w in theta.items()}
  if end.carry is not None and momentum is not None:
    for name, w in momentum.items():
      new[name] = new[name] + _times(end.carry, w)
  if end.write is not None:
    new = {name: w + sums[name][0] for name, w in new.items()}
  if end.momentum_write is None:
    return new, None
  added = {name: of_weights[-1] for name, of_weights in sums.items()}
  if momentum is not None:
    for name, w in momentum.items():
      added[name] = added[name] + _times(end.momentum_decay, w)
  return new, added


def _step_sums(theta, end, x, d, dtype):
  """Weighted sums of the steps of every parameter, one for each weight."""
  weights = [w for w in (end.write, end.momentum_write) if w is not None]
  sums = {}
  for name, columns in x.items():
    steps = [numerics.scale_rows(d[name], w) for w in weights]
    sums[name] = [
      numerics.matmul("bnei,bneo->bnio", columns, step, dtype=dtype)
      for step in steps
    ]
    if bias_name(name) in theta:
      sums[bias_name(name)] = [jnp.sum(step, axis=2) for step in steps]
  return sums


def _outer(scalar, like):
  return scalar.reshape(scalar.shape + (1,) * (like.ndim - scalar.ndim))


def _times(scalar, x):
  return x if scalar is None else _outer(scalar, x) * x


def _rows(rows, bias):
  """[b n c] or None for 1, times [b n o], to [b n c o]."""
  bias = bias[:, :, None]
  return bias if rows is None else rows[..., None] * bias
