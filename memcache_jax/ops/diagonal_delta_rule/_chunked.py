"""The diagonal delta rule by chunks: matmuls inside, a short scan across.

Every token reads the state before it twice: what the removal key finds there
is removed, and what the decayed query finds there becomes y. Between a token
that writes and a later one that reads lies a product of decays per channel.
It is split at the middle of the smallest aligned block that holds both, into
one factor of the reader and one of the writer: both are products of decays,
so that nothing can overflow, and no decay is divided by or taken the logarithm
of. The README beside this file derives it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from einops import rearrange

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops.delta_rule import _chunks, _triangular


def diagonal_delta_rule(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  log_decay: Float[Array, "b t n k"],
  removal_key: Float[Array, "b t n k"],
  rate: Float[Array, "b t n k"],
  state: Float[Array, "b n k v"],
  initial: Float[Array, "n k v"] | None,
  starts: Bool[Array, "b t"] | None,
  chunk_size: int,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b n k v"]]:
  """`diagonal_delta_rule`, chunk-parallel; masked tokens come in as zeros."""
  tokens, dtype = q.shape[1], v.dtype
  if tokens == 0:
    return jnp.zeros_like(v), state
  size = _chunks.power_of_two(min(chunk_size, tokens))
  if starts is not None:
    starts = _chunks.split_starts(starts, size)
  v = _chunks.split(v, size)
  q, k, removal_key, rate, log_decay = (
    _chunks.split(x.astype(jnp.float32), size)
    for x in (q, k, removal_key, rate, log_decay)
  )
  decay = jnp.exp(log_decay)
  # Two rows per token. y_t = q_t S_t is a read of S_{t-1}, like the removal,
  # and one of the two writes of token t itself.
  readers = _interleave(removal_key, q * decay)
  writers = _interleave(rate * removal_key, k)
  own = jnp.stack([q * rate * removal_key, q * k], axis=-2).sum(axis=-1)
  chunks = _read_writes(readers, writers, own, decay, dtype)
  fresh = None
  if starts is not None:
    chunks = _separate(chunks, starts)
    if initial is not None:
      fresh = _read_initial(readers, decay, starts, initial)
  y, state = _solve(chunks, v, fresh, state)
  return _chunks.join(y, tokens).astype(dtype), state


def _interleave(x, y):
  """Rows of x at even, rows of y at odd places."""
  return rearrange([x, y], "two b g n c k -> b g n (c two) k")


def _even_odd(x):
  """The inverse of `_interleave`."""
  return rearrange(x, "b g n (c two) k -> two b g n c k", two=2)


class _Chunks(NamedTuple):
  """Who finds what, with two reads r and two writes w per token.

  Attributes:
    matrix: how much of each write each read finds.
    readers: removal keys (even rows) and queries (odd rows), with the decays
      since before the chunk.
    writers: what the removals write (even) and keys (odd), with the decays
      until the end of the chunk.
    decay: product of the decays of the chunk.
  """

  matrix: Float[Array, "b g n r w"]
  readers: Float[Array, "b g n r k"]
  writers: Float[Array, "b g n w k"]
  decay: Float[Array, "b g n k"]


def _read_writes(readers, writers, own, decay, dtype):
  """`_Chunks`, by merging neighbouring blocks of tokens."""
  b, g, n, c, k = decay.shape
  # Blocks p of all chunks side by side. (With an axis for chunks and one for
  # the two rows, XLA crashed on CPUs when it compiled the gradient: rank 9.)
  flatten = lambda x, rows: jnp.moveaxis(x, 1, 2).reshape(
    b, n, g * c, *rows, x.shape[-1]
  )
  readers, writers = flatten(readers, (2,)), flatten(writers, (2,))
  own = flatten(own, (1,))
  matrix = jnp.concatenate([jnp.zeros_like(own), own], axis=-2)
  decay = flatten(decay, ())
  while decay.shape[2] > g:
    (r0, r1), (w0, w1) = _halves(readers), _halves(writers)
    (d0, d1), (m0, m1) = _halves(decay), _halves(matrix)
    below = numerics.matmul("bnprk,bnpwk->bnprw", r1, w0, dtype=dtype)
    matrix = _triangular.stack_blocks(m0, below, m1)
    readers = jnp.concatenate([r0, r1 * d0[..., None, :]], axis=-2)
    writers = jnp.concatenate([w0 * d1[..., None, :], w1], axis=-2)
    decay = d0 * d1
  chunks = _Chunks(matrix, readers, writers, decay)
  return _Chunks(*(jnp.moveaxis(x, 2, 1) for x in chunks))


def _halves(x):
  """The left and the right block of every pair of neighbours."""
  x = x.reshape(*x.shape[:2], -1, 2, *x.shape[3:])
  return x[:, :, :, 0], x[:, :, :, 1]


def _separate(chunks, starts):
  """Removes what would reach over a document start."""
  document = jnp.repeat(jnp.cumsum(starts, axis=-1), 2, axis=-1)[:, :, None]
  last = document[..., -1:]
  same = document[..., :, None] == document[..., None, :]
  return _Chunks(
    jnp.where(same, chunks.matrix, 0.0),
    jnp.where((document == 0)[..., None], chunks.readers, 0.0),
    jnp.where((document == last)[..., None], chunks.writers, 0.0),
    jnp.where(last == 0, chunks.decay, 0.0),
  )


class _Fresh(NamedTuple):
  """What comes from the initial memory of documents that start in a chunk."""

  reads: Float[Array, "b g n r v"]
  end: Float[Array, "b g n k v"]


def _read_initial(readers, decay, starts, initial):
  initial = initial.astype(jnp.float32)
  upto = _chunks.since_start(decay, starts)
  before = jnp.pad(upto[..., :-1, :], [(0, 0)] * 3 + [(1, 0), (0, 0)])
  before = jnp.where(starts[:, :, None, :, None], 1.0, before)
  readers *= jnp.repeat(before, 2, axis=-2)
  reads = jnp.einsum("bgnrk,nkv->bgnrv", readers, initial, precision="highest")
  return _Fresh(reads, upto[..., -1, :, None] * initial[None, None])


def _solve(chunks, v, fresh, state):
  """y and the state, from the system that the removals form."""
  dtype, width = v.dtype, v.shape[-1]
  matmul = lambda spec, a, b: numerics.matmul(spec, a, b, dtype=dtype)
  by_remover, by_query = rearrange(
    chunks.matrix, "b g n (c r) (e w) -> r w b g n c e", r=2, w=2
  )
  remover, query = _even_odd(chunks.readers)
  removal, key = _even_odd(chunks.writers)

  # found = u + w S: what each removal key finds, given the state S before the
  # chunk. It depends on what earlier tokens of the chunk found and removed.
  found = matmul("bgnce,bgnev->bgncv", by_remover[1], v)
  if fresh is not None:
    initial_found, initial_y = _even_odd(fresh.reads)
    found += initial_found
  solved = _triangular.solve(
    by_remover[0], jnp.concatenate([found, remover], axis=-1), dtype
  )
  u, w = solved[..., :width], solved[..., width:]

  add = matmul("bgnck,bgncv->bgnkv", key, v)
  if fresh is not None:
    add += fresh.end

  def advance(state, u, w, removal, decay, add):
    found = u + matmul("bnck,bnkv->bncv", w, state)
    new = decay[..., None] * state + add
    new -= matmul("bnck,bncv->bnkv", removal, found)
    return new, (state, found)

  (before, found), state = _chunks.scan_chunks(
    advance, state, (u, w, removal, chunks.decay, add)
  )
  y = (
    matmul("bgnck,bgnkv->bgncv", query, before)
    + matmul("bgnce,bgnev->bgncv", by_query[1], v)
    - matmul("bgnce,bgnev->bgncv", by_query[0], found)
  )
  if fresh is not None:
    y += initial_y
  return y, state
