"""The gated read as one matmul per chunk of tokens.

sum_i gamma_i q S_i = (gamma (x) q) [S_1; S_2; ...]: the gate scales the query,
and the sum over memories joins the contraction over keys.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Float


def cache_read(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  weights: Float[Array, "b t n s"],
  chunk_size: int,
) -> Float[Array, "b t n v"]:
  """`cache_read`, a chunk of tokens at a time."""
  tokens, slots = q.shape[1], states.shape[1]
  if tokens == 0 or slots == 0:
    return jnp.zeros((*q.shape[:3], states.shape[-1]), jnp.float32)
  stacked = rearrange(states, "b s n k v -> b n (s k) v")

  # Recomputed in the backward pass: the gated queries of all tokens together
  # would be as large as one query per token and stored memory.
  @jax.checkpoint
  def read(q, weights):
    gated = weights[..., None] * q.astype(jnp.float32)[:, :, :, None]
    gated = rearrange(gated, "b c n s k -> b n c (s k)")
    return numerics.matmul("bncj,bnjv->bcnv", gated, stacked, dtype=q.dtype)

  size = min(chunk_size, tokens)
  if size == tokens:
    return read(q, weights)
  q, weights = _split(q, size), _split(weights, size)
  y = jax.lax.map(lambda x: read(*x), (q, weights))
  return rearrange(y, "g b c n v -> b (g c) n v")[:, :tokens]


def _split(x, size):
  x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)])
  return rearrange(x, "b (g c) n k -> g b c n k", c=size)
