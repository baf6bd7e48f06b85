"""Linear attention by chunks: matmuls inside, a short scan across.

Inside a chunk (c rows, e columns) the product of decays between two tokens is
a difference of cumulative logs, so that

  y = A * (q S_0) + ((q k^T) * W) v,    S_end = A_end S_0 + (k * W_end)^T v

with W = D E: D the decay products and E the banded write weights. The README
beside this file derives it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax import numerics, token_layout
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops.linear_attention._state import LinearAttentionState


def linear_attention(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  log_decay: Float[Array, "b t n"] | None,
  write: Float[Array, "b t n w"] | None,
  state: LinearAttentionState,
  mask: Bool[Array, "b t"] | None,
  starts: Bool[Array, "b t"] | None,
  chunk_size: int,
  *,
  empty: bool = False,
) -> tuple[Float[Array, "b t n v"], LinearAttentionState]:
  """`linear_attention`, chunk-parallel; masked tokens come in as zeros.

  Where the state is known to be empty, one chunk reads nothing of it.
  """
  if q.shape[1] == 0:
    return jnp.zeros_like(v), state
  if mask is None or state.keys is None:
    return _chunks(
      q, k, v, log_decay, write, state, None, starts, chunk_size, empty
    )
  # A window counts tokens that exist, so those are moved together first.
  plan = token_layout.compact(mask)
  q, k, v, log_decay, write, starts = token_layout.take_tokens(
    (q, k, v, log_decay, write, starts), plan.source
  )
  y, state = _chunks(
    *(q, k, v, log_decay, write, state, plan.count, starts, chunk_size, empty)
  )
  return token_layout.take_tokens(y, plan.target), state


class _Weights(NamedTuple):
  """Scalars of each chunk: how much of what each row reads."""

  inner: Float[Array, "b g n c e"]  # written tokens, per reading row
  carry: Float[Array, "b g n c"] | None  # state before the chunk, per row
  end: Float[Array, "b g n e"]  # written tokens, in the chunk's last state


def _chunks(q, k, v, log_decay, write, state, count, starts, chunk_size, empty):
  b, tokens, n, _ = k.shape
  size = min(chunk_size, tokens)
  tails = _tails(state, k, v, count, starts)
  ages = None
  if state.keys is not None and starts is not None:
    # Tokens before this call lie in the tail, so that all may be reached.
    reach = jnp.full(b, state.keys.shape[1], jnp.int32)
    ages = token_layout.age_in_document(starts, reach)
  dtype = v.dtype
  # Padding writes nothing and decays nothing, as it consists of zeros.
  q, k, v, log_decay, write, starts, ages = [
    x if x is None else _split(x, size)
    for x in (q, k, v, log_decay, write, starts, ages)
  ]
  shape = (b, -(-tokens // size), size, n)
  weights = _weights(log_decay, write, starts, ages, shape)
  if state.keys is not None:
    k, v = _extend(k, state.keys), _extend(v, state.values)
  y, matrix = _read(q, k, v, weights, state.matrix, empty)
  y = rearrange(y, "b g c n v -> b (g c) n v")[:, :tokens]
  return y.astype(dtype), LinearAttentionState(matrix, *tails)


def _split(x, size):
  x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
  return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _weights(log_decay, write, starts, ages, shape):
  """Decay products and write weights of every chunk; see the module's top."""
  b, g, c, n = shape
  if write is None:
    write = jnp.ones((1, 1, 1, 1, 1), jnp.float32)
  write = rearrange(write.astype(jnp.float32), "b g c n w -> b g n w c")
  if ages is not None:  # a window does not reach over a document start
    offsets = jnp.arange(write.shape[3]).reshape(1, 1, 1, -1, 1)
    write = jnp.where(offsets <= ages[:, :, None, None], write, 0.0)
  causal = jnp.tril(jnp.ones((1, 1, 1, c, c), bool))
  if log_decay is None and starts is None:
    decay = causal.astype(jnp.float32)
    carry = None
  else:
    logs, counts = _log_decays(log_decay, starts, (b, g, c, n))
    keep = causal & (counts[..., :, None] == counts[..., None, :])
    decay = numerics.masked_exp(logs[..., :, None] - logs[..., None, :], keep)
    carry = numerics.masked_exp(logs, counts == 0)
  inner = _banded(decay, write)
  inner = jnp.broadcast_to(inner, (b, g, n, *inner.shape[3:]))
  return _Weights(inner, carry, inner[..., -1, :])


def _log_decays(log_decay, starts, shape):
  if log_decay is None:
    log_decay = jnp.zeros(shape, jnp.float32)
  log_decay = log_decay.astype(jnp.float32)
  if starts is None:
    starts = jnp.zeros(shape[:3], bool)
  log_decay = rearrange(log_decay, "b g c n -> b g n c")
  return numerics.decay_runs(log_decay, starts[:, :, None])


def _banded(
  decay: Float[Array, "#b #g #n c c"], write: Float[Array, "#b #g #n w #c"]
) -> Float[Array, "#b #g #n c e"]:
  """W = D E: token i is written at the steps i, ..., i + w - 1.

  The w - 1 tokens before the chunk come first on the last axis.
  """
  window = write.shape[3]
  parts = []
  for offset in range(window):
    part = decay * write[:, :, :, offset, None, :]
    before = window - 1 - offset
    parts.append(jnp.pad(part, [(0, 0)] * 4 + [(before, offset)]))
  return sum(parts[1:], start=parts[0])


def _extend(x, tail):
  """Puts the tokens of the window before each chunk in front of it."""
  w = tail.shape[1]
  b, g, c = x.shape[:3]
  flat = x.reshape(b, g * c, *x.shape[3:])
  flat = jnp.concatenate([tail.astype(x.dtype), flat], axis=1)
  index = jnp.arange(g)[:, None] * c + jnp.arange(w)[None]
  before = jnp.take(flat, index.reshape(-1), axis=1)
  before = before.reshape(b, g, w, *x.shape[3:])
  return jnp.concatenate([before, x], axis=2)


def _read(q, k, v, weights, matrix, empty):
  """Reads every chunk, and carries the state across chunks."""
  dtype = q.dtype
  scores = numerics.matmul("bgcnk,bgenk->bgnce", q, k, dtype=dtype)
  y = numerics.matmul(
    "bgnce,bgenv->bgcnv", scores * weights.inner, v, dtype=dtype
  )
  end = rearrange(weights.end, "b g n e -> b g e n 1")
  written = numerics.matmul(
    "bgenk,bgenv->bgnkv", k.astype(jnp.float32) * end, v, dtype=dtype
  )
  if empty and k.shape[1] == 1:
    return y, written[:, 0]
  keep = None if weights.carry is None else weights.carry[..., -1]
  before, matrix = _carry(matrix, written, keep)
  carried = numerics.matmul("bgcnk,bgnkv->bgcnv", q, before, dtype=dtype)
  if weights.carry is not None:
    carried *= rearrange(weights.carry, "b g n c -> b g c n 1")
  return y + carried, matrix


def _carry(matrix, written, keep):
  """States before each chunk, and after the last one."""
  if keep is None:
    keep = jnp.ones((1, written.shape[1], 1), jnp.float32)

  def step(matrix, inputs):
    written, keep = inputs
    return keep[..., None, None] * matrix + written, matrix

  inputs = (jnp.moveaxis(written, 1, 0), jnp.moveaxis(keep, 1, 0))
  matrix, before = jax.lax.scan(step, matrix, inputs)
  return jnp.moveaxis(before, 0, 1), matrix


def _tails(state, k, v, count, starts):
  """The last w - 1 tokens of the running document, after this call."""
  if state.keys is None:
    return None, None
  b, t = k.shape[:2]
  w = state.keys.shape[1]
  count = jnp.full(b, t) if count is None else count
  index = (
    count[:, None] + jnp.arange(w)[None]
  )  # in the old tail, then this call
  keep = jnp.ones((b, w), bool)
  if starts is not None:
    last = jnp.max(
      jnp.where(starts, jnp.arange(t)[None], -1), axis=1, initial=-1
    )
    keep = index >= jnp.where(last < 0, 0, last + w)[:, None]
  tails = []
  for tail, x in ((state.keys, k), (state.values, v)):
    both = jnp.concatenate([tail, x.astype(jnp.float32)], axis=1)
    both = token_layout.take_tokens(both, index)
    tails.append(jnp.where(keep[..., None, None], both, 0.0))
  return tails
