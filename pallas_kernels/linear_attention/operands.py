"""What the kernels take: prepared arrays, heads before tokens."""

from typing import NamedTuple

import jax

# Rows of `Operands.scalars`; the first alone where nothing decays.
OWN, LOGS, RESETS, WRITE, END, KEEP = range(6)


class Operands(NamedTuple):
  """Inputs of one call with g segments of c tokens, t = g c.

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
