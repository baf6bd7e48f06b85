"""`selected_read`: gradient and choice of implementation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Int
from memcache_jax.ops import _dispatch
from memcache_jax.ops.cache_read import _selected_kernels

Read: TypeAlias = Callable[..., Float[Array, "b t n v"]]

_NAME = "selected_read"


def selected_read(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  *,
  xla: Read,
  implementation: _dispatch.Implementation | None = None,
) -> Float[Array, "b t n v"]:
  r"""Reads the few stored matrix memories that each token selected.

  .. math:: y_t = \sum_{i \in R_t} \gamma_{t,i}\, q_t S^{(i)}

  Memory Caching (arXiv 2602.24281), Eq. 16, for matrix memories in row
  vectors. What was not selected may be nan.

  Args:
    q: queries; float32 or bfloat16.
    states: stored memories, float32.
    index: which of them each token reads, without repetition; -1 for none.
    weights: the gate of each.
    xla: the same of these four arrays, where no kernel runs.
    implementation: "mosaic_tpu", None for the fastest on the platform the
      program is compiled for, or any other for `xla`.

  Returns:
    y in float32.

  Raises:
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, where it may run as a kernel.
  """
  why_not = None
  if implementation in (None, "mosaic_tpu"):
    why_not = _selected_kernels.why_not(q, states, index)
  pairs, slots = index.shape[1] * index.shape[3], states.shape[1]
  if implementation is None and pairs <= slots:
    implementation = "xla"  # no state is read by many: nothing to sort
  choice = _dispatch.resolve(_NAME, implementation, {"mosaic_tpu": why_not})
  if choice in ("reference", "xla"):
    return xla(q, states, index, weights)
  return _by_kernel(_Options(xla, choice), q, states, index, weights)


@dataclass(frozen=True)
class _Options:
  """What is known without the arrays."""

  xla: Read
  choice: _dispatch.Choice


# Axes of what goes in and comes out, for devices that hold a part of it.
_AXES = ("b t n k", "b s n k v", "b t n r", "b t n r")
_OUTPUT_AXES = "b t n v"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(options, q, states, index, weights):
  return _forward(options, q, states, index, weights)[0]


def _forward(options, q, states, index, weights):
  def forward(*inputs):
    return _dispatch.run(
      options.choice,
      options.xla,
      {"mosaic_tpu": _selected_kernels.mosaic_tpu},
      *inputs,
    )

  def spread(*inputs):
    return sharding.over_batch_and_heads(forward, inputs, _AXES, _OUTPUT_AXES)

  inputs = q, states, index, weights
  return _dispatch.first_order(_NAME, spread, *inputs), inputs


def _backward(options, inputs, gradient):
  def xla(q, states, index, weights, gradient):
    forward = lambda q, states, weights: options.xla(q, states, index, weights)
    return jax.vjp(forward, q, states, weights)[1](gradient)

  def backward(*args):
    return _dispatch.run(
      options.choice,
      xla,
      {"mosaic_tpu": _selected_kernels.mosaic_tpu_vjp},
      *args,
    )

  def spread(*args):
    q, states, _, weights = _AXES
    return sharding.over_batch_and_heads(
      backward, args, (*_AXES, _OUTPUT_AXES), (q, states, weights)
    )

  d_q, d_states, d_weights = _dispatch.first_order(
    _NAME, spread, *inputs, gradient
  )
  return d_q, d_states, None, d_weights


_by_kernel.defvjp(_forward, _backward)
