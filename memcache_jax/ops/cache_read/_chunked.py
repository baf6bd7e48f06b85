"""The gated read as one matmul per chunk of tokens.

All stored memories side by side are one wide matrix: a chunk of queries reads
every memory in a single matmul, and the gates then weigh the reads.
"""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Float
from memcache_jax.ops.cache_read._one_token import read_one_token


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
  if tokens == 1:
    read = functools.partial(numerics.matmul, "rnkv,rtnk->rtnv", dtype=q.dtype)
    return read_one_token(read, states, q, weights)
  size = min(chunk_size, tokens)
  wide = rearrange(states, "b s n k v -> b n k (s v)")

  # Recomputed in the backward pass: the reads of all tokens together would be
  # as large as one value per token and stored memory.
  @jax.checkpoint
  def read(chunk):
    q, weights = chunk
    reads = numerics.matmul("bnck,bnkj->bncj", q, wide, dtype=q.dtype)
    reads = rearrange(reads, "b n c (s v) -> b n c s v", s=slots)
    return jnp.einsum("bncs,bncsv->bncv", weights, reads)

  y = jax.lax.map(read, (_split(q, size), _split(weights, size)))
  return rearrange(y, "g b n c v -> b (g c) n v")[:, :tokens]


def _split(x, size):
  x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)])
  return rearrange(x, "b (g c) n k -> g b n c k", c=size)
