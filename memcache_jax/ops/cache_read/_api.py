"""`cache_read`: checks, gradient, choice of implementation."""

import functools

from memcache_jax.array_typing import Array, Float
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.cache_read import _chunked, _kernels, _reference

_NAME = "cache_read"


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
    implementation: "reference", "xla", "mosaic_tpu", "triton" (for GPUs;
      compiled but not yet run on one) or None for the fastest on the platform
      the program is compiled for.

  Returns:
    y in float32; it is summed with other reads before it is rounded.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, where it may run as a kernel: those are for "xla".
    TypeError: by JAX, on derivatives in forward mode there.

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
  if implementation is None and q.shape[1] == 1:
    implementation = "xla"  # which moves nothing but the states, once
  why_not = {}
  if implementation not in ("reference", "xla"):
    why_not = _kernels.why_not(q, states)
  choice = _dispatch.resolve(_NAME, implementation, why_not)
  if choice == "reference":
    return _reference.cache_read(q, states, weights)
  if choice == "xla":
    return _chunked.cache_read(q, states, weights, chunk_size)
  return _dispatch.run_spread(
    _NAME,
    choice,
    functools.partial(_chunked.cache_read, chunk_size=chunk_size),
    {"mosaic_tpu": _kernels.mosaic_tpu, "triton": _kernels.triton},
    {"mosaic_tpu": _kernels.mosaic_tpu_vjp, "triton": _kernels.triton_vjp},
    (q, states, weights),
    ("b t n k", "b s n k v", "b t n s"),
    "b t n v",
  )
