"""The delta rule by chunks: matmuls inside, a short scan across.

Inside a chunk (c rows, e columns) every written value depends on the earlier
ones through the overlap of their keys. Solving that triangular system makes
them linear in the state S before the chunk,

  written = U - W S,  S_end = A_end S + K_end^T written,

and U, W of all chunks are computed in parallel. The README beside this file
derives it.
"""

from typing import NamedTuple

import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops.delta_rule import _chunks, _triangular


def delta_rule(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  beta: Float[Array, "b t n"],
  log_decay: Float[Array, "b t n"] | None,
  state: Float[Array, "b n k v"],
  initial: Float[Array, "n k v"] | None,
  starts: Bool[Array, "b t"] | None,
  chunk_size: int,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b n k v"]]:
  """`delta_rule`, chunk-parallel; masked tokens come in as zeros."""
  tokens, dtype = q.shape[1], v.dtype
  if tokens == 0:
    return jnp.zeros_like(v), state
  size = _chunks.power_of_two(min(chunk_size, tokens))
  if starts is not None:
    starts = _chunks.split_starts(starts, size)
  if log_decay is not None:
    log_decay = _chunks.split(log_decay, size)
  q, k, v, beta = (_chunks.split(x, size) for x in (q, k, v, beta))
  decays = _decays(log_decay, starts, initial, beta.shape)
  beta = beta.astype(jnp.float32)[..., None]
  overlap = numerics.matmul("bgnck,bgnek->bgnce", k, k, dtype=dtype)
  strict = jnp.tril(beta * overlap * decays.between, -1)
  carried = k.astype(jnp.float32) * decays.carry[..., None]
  wanted = v.astype(jnp.float32)
  if initial is not None:
    wanted -= _read_initial(k, decays, initial)
  solved = _triangular.solve(
    strict, beta * jnp.concatenate([wanted, carried], axis=-1), dtype
  )
  u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]

  end = k.astype(jnp.float32) * decays.between[..., -1, :, None]
  chunks = (u, w, end, decays.carry[..., -1], decays.fresh[..., -1])

  def advance(state, u, w, end, keep, fresh):
    written = u - numerics.matmul("bnck,bnkv->bncv", w, state, dtype=dtype)
    new = keep[..., None, None] * state
    new += numerics.matmul("bnck,bncv->bnkv", end, written, dtype=dtype)
    if initial is not None:
      new += fresh[..., None, None] * initial.astype(jnp.float32)[None]
    return new, (state, written)

  (before, written), state = _chunks.scan_chunks(advance, state, chunks)

  scores = numerics.matmul("bgnck,bgnek->bgnce", q, k, dtype=dtype)
  y = numerics.matmul(
    "bgnce,bgnev->bgncv", scores * decays.between, written, dtype=dtype
  )
  y += decays.carry[..., None] * numerics.matmul(
    "bgnck,bgnkv->bgncv", q, before, dtype=dtype
  )
  if initial is not None:
    y += _read_initial(q, decays, initial)
  return _chunks.join(y, tokens).astype(dtype), state


class _Decays(NamedTuple):
  """Decay products of each chunk, up to and including each row's token."""

  between: Float[Array, "b g n c e"]  # since column e was written; 0 above
  carry: Float[Array, "b g n c"]  # since before the chunk
  fresh: Float[Array, "b g n c"]  # since a document start in the chunk


def _decays(log_decay, starts, initial, shape):
  b, g, _, c = shape
  causal = jnp.tril(jnp.ones((1, 1, 1, c, c), bool))
  fresh = jnp.zeros(shape, jnp.float32)
  if log_decay is None and starts is None:
    return _Decays(causal.astype(jnp.float32), jnp.ones_like(fresh), fresh)
  if log_decay is None:
    log_decay = jnp.zeros(shape, jnp.float32)
  log_decay = log_decay.astype(jnp.float32)
  if starts is None:
    starts = jnp.zeros((b, g, c), bool)
  elif initial is not None:
    fresh = _chunks.since_start(jnp.exp(log_decay), starts)
  logs, counts = numerics.decay_runs(log_decay, starts[:, :, None])
  same = causal & (counts[..., :, None] == counts[..., None, :])
  between = numerics.masked_exp(logs[..., :, None] - logs[..., None, :], same)
  return _Decays(between, numerics.masked_exp(logs, counts == 0), fresh)


def _read_initial(q, decays, initial):
  """Reads the decayed initial memory of a document begun in the chunk."""
  # In float32 also for bfloat16 operands, of which XLA's CPU backend cannot
  # multiply those that share only one batch axis.
  q, initial = q.astype(jnp.float32), initial.astype(jnp.float32)
  read = jnp.einsum("bgnck,nkv->bgncv", q, initial, precision="highest")
  return decays.fresh[..., None] * read
