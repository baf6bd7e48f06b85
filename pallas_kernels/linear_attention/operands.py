"""What the kernels take: prepared arrays."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Rows of `scalars`; the first alone where nothing decays. CARRY on GPUs only.
OWN, LOGS, RESETS, WRITE, END, KEEP, CARRY = range(7)


class Operands(NamedTuple):
  """On TPUs: one call with g segments of c tokens, t = g c.

  Attributes:
    q: queries [b n t k].
    k: keys [b n t k]; zero where there is no token.
    v: values [b n t v]; zero where there is no token.
    weights: gates [b n slots t] float32 of all memories a token may read:
      those carried into the call, then the end state of each of its segments,
      then what fills them up to a multiple of 8. Zero for states that a token
      must not read.
    scalars: one row per kind of number [b n 1|6 t], float32. OWN: gate of the
      online memory. LOGS, RESETS: running sum of log decays since the
      segment's start, and count of full resets in it. WRITE: write strength.
      END: what is left at the segment's end of what the token wrote. KEEP:
      what is left of the state before the segment, the same at all its tokens.
    memories: [b s n k v] float32, carried into the call; the last one is what
      the first segment goes on from, as far as its KEEP says.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  weights: jax.Array
  scalars: jax.Array
  memories: jax.Array | None = None


class TokenOperands(NamedTuple):
  """On GPUs: one call of t tokens, where the last segment may be short.

  Attributes:
    q: queries [b t n k].
    k: keys [b t n k]; zero where there is no token.
    v: values [b t n v]; zero where there is no token.
    weights: gates [b t n slots] of the memories carried into the call, then of
      the end states of its segments. Not looked at where a token must not read.
    scalars: as of `Operands`, [b n 1|7 t]. CARRY: gate of the state that the
      token's segment goes on from, 0 where it starts from nothing.
    memories: [b s n k v] float32, carried into the call.
    state: [b 1 n k v] float32, which the first segment goes on from.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  weights: jax.Array
  scalars: jax.Array
  memories: jax.Array | None = None
  state: jax.Array | None = None


def like(x, *shape, dtype=jnp.float32):
  """An output that varies over a mesh as `x` does."""
  return jax.typeof(x).update(shape=shape, dtype=dtype, weak_type=False)
