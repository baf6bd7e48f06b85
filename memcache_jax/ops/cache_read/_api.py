"""`cache_read`: checks, gradient, choice of implementation."""

import functools
from dataclasses import dataclass

import jax

from memcache_jax import sharding
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
    implementation: "reference", "xla", "mosaic_tpu" or None for the fastest
      on the platform the program is compiled for.

  Returns:
    y in float32; it is summed with other reads before it is rounded.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, where it may run as a kernel.

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
  why_not = None
  if implementation in (None, "mosaic_tpu"):
    why_not = _kernels.why_not(q, states)
  choice = _dispatch.resolve(_NAME, implementation, {"mosaic_tpu": why_not})
  if choice == "reference":
    return _reference.cache_read(q, states, weights)
  if choice == "xla":
    return _chunked.cache_read(q, states, weights, chunk_size)
  return _by_kernel(_Options(chunk_size, choice), q, states, weights)


@dataclass(frozen=True)
class _Options:
  """What is known without the arrays."""

  chunk_size: int
  choice: _dispatch.Choice


# Axes of what goes in and comes out, for devices that hold a part of it.
_AXES = ("b t n k", "b s n k v", "b t n s")
_OUTPUT_AXES = "b t n v"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(options, q, states, weights):
  return _forward(options, q, states, weights)[0]


def _forward(options, q, states, weights):
  def forward(q, states, weights):
    return _dispatch.run(
      options.choice,
      lambda q, states, weights: _chunked.cache_read(
        q, states, weights, options.chunk_size
      ),
      {"mosaic_tpu": _kernels.mosaic_tpu},
      *(q, states, weights),
    )

  def spread(*inputs):
    return sharding.over_batch_and_heads(forward, inputs, _AXES, _OUTPUT_AXES)

  inputs = q, states, weights
  return _dispatch.first_order(_NAME, spread, *inputs), inputs


def _backward(options, inputs, gradient):
  def xla(q, states, weights, gradient):
    forward = lambda q, states, weights: _chunked.cache_read(
      q, states, weights, options.chunk_size
    )
    return jax.vjp(forward, q, states, weights)[1](gradient)

  def backward(*args):
    return _dispatch.run(
      options.choice, xla, {"mosaic_tpu": _kernels.mosaic_tpu_vjp}, *args
    )

  def spread(*args):
    return sharding.over_batch_and_heads(
      backward, args, (*_AXES, _OUTPUT_AXES), _AXES
    )

  return _dispatch.first_order(_NAME, spread, *inputs, gradient)


_by_kernel.defvjp(_forward, _backward)
