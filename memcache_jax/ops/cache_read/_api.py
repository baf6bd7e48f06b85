"""`cache_read`: checks and choice of implementation."""

from memcache_jax.array_typing import Array, Float
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.cache_read import _chunked, _reference


def cache_read(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  weights: Float[Array, "b t n s"],
  *,
  chunk_size: int = 256,
  implementation: _dispatch.Implementation | None = None,
) -> Float[Array, "b t n v"]:
  r"""Reads many stored matrix memories at once, each with its own gate.

  .. math:: y_t = \sum_i \gamma_{t,i}\, q_t S^{(i)}

  Memory Caching (arXiv 2602.24281), Eq. 9, for matrix memories in row
  vectors. Nothing of the size tokens x memory is built.

  Args:
    q: queries; float32 or bfloat16.
    states: stored memories, float32.
    weights: gate of every token for every stored memory; 0 where a token may
      not read it.
    chunk_size: tokens computed in parallel; changes speed and memory only.
    implementation: "reference", "xla" or None for the fastest.

  Returns:
    y in float32; it is summed with other reads before it is rounded.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation does not exist.

  Example:
    >>> import jax.numpy as jnp
    >>> from memcache_jax.ops import cache_read
    >>> states = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])[None, :, None]
    >>> q, weights = jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1, 2), 0.5)
    >>> cache_read(q, states, weights).tolist()
    [[[[2.0, 2.0]]]]
  """
  _checks.check_shapes(
    {
      "q": (q, "b t n k"),
      "states": (states, "b s n k v"),
      "weights": (weights, "b t n s"),
    }
  )
  _checks.check_floating(q=q, states=states, weights=weights)
  _checks.check_positive(chunk_size=chunk_size)
  if _dispatch.resolve("cache_read", implementation) == "reference":
    return _reference.cache_read(q, states, weights)
  return _chunked.cache_read(q, states, weights, chunk_size)
