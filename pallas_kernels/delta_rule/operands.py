"""What the kernels take: prepared arrays."""

from typing import NamedTuple

import jax

# Tokens of a chunk: as many as a matrix unit has rows.
CHUNK = 128

# Rows of `scalars`.
BETA, LOGS, RESETS, CARRY, END, KEEP, FRESH, FRESH_END = range(8)


class Operands(NamedTuple):
  """One call of t tokens, a multiple of CHUNK.

  Attributes:
    q: queries [b n t k].
    k: keys [b n t k]; zero where there is no token.
    v: values [b n t v]; zero where there is no token.
    scalars: one row per kind of number [b n 8 t], float32. BETA: write
      strength. LOGS, RESETS: running sum of log decays, and count of full
      resets, since the chunk's start. CARRY, FRESH: what is left at the token
      of the memory before the chunk, and of the `initial` one of a document
      that started in it. END: what is left at the chunk's end of what the
      token wrote. KEEP, FRESH_END: CARRY and FRESH of the chunk's last token,
      the same at all.
    state: the memory before the first token [b n k v], float32.
    initial: that of a document that starts [b n k v], float32. None: FRESH is
      zero everywhere.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  scalars: jax.Array
  state: jax.Array
  initial: jax.Array | None = None
