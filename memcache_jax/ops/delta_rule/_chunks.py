"""What the delta rules have in common: layout in chunks, and the long scan."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Bool, Float, PyTree, Shaped


def initial_state(
  q: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  state: Float[Array, "b n k v"] | None,
  initial: Float[Array, "n k v"] | None,
) -> Float[Array, "b n k v"]:
  """The float32 memory before the first token.

  Without a state it is built by contracting an empty slice of the inputs,
  which gives it their sharding on a mesh, whatever that is.
  """
  if state is not None:
    return state.astype(jnp.float32)
  q0, v0 = q[:, :0].astype(jnp.float32), v[:, :0].astype(jnp.float32)
  zero = jnp.einsum("btnk,btnv->bnkv", q0, v0)
  return zero if initial is None else zero + initial.astype(jnp.float32)[None]


def power_of_two(size: int) -> int:
  """The smallest power of two that is not less than ``size``."""
  return 1 << (size - 1).bit_length()


def split(
  x: Shaped[Array, "b t n ..."], size: int
) -> Shaped[Array, "b g n c ..."]:
  """Cuts tokens into chunks; zeros fill the last one."""
  x = _pad(x, size)
  return rearrange(x, "b (g c) n ... -> b g n c ...", c=size)


def split_starts(starts: Bool[Array, "b t"], size: int) -> Bool[Array, "b g c"]:
  """The same for document starts, which all heads share."""
  return rearrange(_pad(starts, size), "b (g c) -> b g c", c=size)


def _pad(x, size):
  return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))


def join(y: Float[Array, "b g n c v"], tokens: int) -> Float[Array, "b t n v"]:
  """The inverse of `split`."""
  return rearrange(y, "b g n c v -> b (g c) n v")[:, :tokens]


def since_start(
  decay: Float[Array, "b g n c ..."], starts: Bool[Array, "b g c"]
) -> Float[Array, "b g n c ..."]:
  """Product of the decays of the running document up to each token.

  It is 0 before the first document start of the chunk. Products are formed,
  not differences of logs, so that a decay of 0 needs no care.
  """
  starts = starts[:, :, None]
  starts = starts.reshape(starts.shape + (1,) * (decay.ndim - 4))
  starts = jnp.broadcast_to(starts, decay.shape)

  def join_runs(left, right):
    return jnp.where(right[1], right[0], left[0] * right[0]), left[1] | right[1]

  product, seen = jax.lax.associative_scan(join_runs, (decay, starts), axis=3)
  return jnp.where(seen, product, 0.0)


def scan_chunks(
  advance: Callable[..., tuple[Array, PyTree]],
  state: Float[Array, "b n k v"],
  chunks: PyTree,
) -> tuple[PyTree, Float[Array, "b n k v"]]:
  """Runs ``state, out = advance(state, *chunk)`` over the chunks [b g ...].

  This is all that is sequential.
  """
  chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), chunks)
  state, out = jax.lax.scan(lambda s, x: advance(s, *x), state, chunks)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out), state
