"""`read_selected_networks`: reads of the few networks that tokens selected."""

import functools
from collections.abc import Callable

from memcache_jax.array_typing import Array, Float, Int, Params
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.cache_read import _selected_kernels
from memcache_jax.ops.mlp_memory import _read_kernels, _read_triton
from memcache_jax.ops.mlp_memory._architecture import (
  Architecture,
  apply_architecture,
  static_names,
)

_NAME = "read_selected_networks"


def read_selected_networks(
  architecture: Architecture,
  params: Params,
  memories: Params,
  q: Float[Array, "b t n k"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  *,
  xla: Callable[..., Float[Array, "b t n v"]],
  implementation: _dispatch.Implementation | None = None,
) -> Float[Array, "b t n v"]:
  r"""Reads the few stored networks that each token selected.

  .. math:: y_t = \sum_{i \in R_t} \gamma_{t,i}\, M_{\theta^{(i)}}(q_t)

  Memory Caching (arXiv 2602.24281), Eq. 16. What was not selected may be nan.

  Args:
    architecture: the network M.
    params: its parameters, of which only the static ones are read.
    memories: stored weights, leaves [b s n ...], float32.
    q: queries; float32 or bfloat16.
    index: which of them each token reads, without repetition; -1 for none.
    weights: the gate of each.
    xla: the same where no kernel runs: of a function that reads one network
      for each row and head, given static parameters, its weights and queries;
      of static parameters, q, memories, index and weights. It must not hold
      anything that is traced.
    implementation: "mosaic_tpu", for networks of this library; "triton" (for
      GPUs; compiled but not yet run on one), for those of one hidden layer at
      most; "xla" and "reference" for `xla`; or None for the fastest on the
      platform the program is compiled for.

  Returns:
    y in float32.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, where it may run as a kernel: those are for "xla".
    TypeError: by JAX, on derivatives in forward mode there.
  """
  _checks.check_shapes(
    {
      "q": (q, "b t n k"),
      "index": (index, "b t n r"),
      "weights": (weights, "b t n r"),
      **_read_kernels.shapes(memories),
    }
  )
  _checks.check_floating(q=q, weights=weights, **memories)
  _checks.check_integers(index=index)
  static = {name: params[name] for name in static_names(architecture)}
  sizes = _read_kernels.sizes_of(architecture, q, memories, static)
  pairs = index.shape[1] * index.shape[3]
  if implementation is None and pairs <= sizes.networks:
    implementation = "xla"  # no network is read by many: nothing to sort
  why_not = {}
  if implementation not in ("reference", "xla"):
    why_not = {
      "mosaic_tpu": _why_not(sizes, q, index),
      "triton": _read_triton.why_not(sizes),
    }
  choice = _dispatch.resolve(_NAME, implementation, why_not)
  read = functools.partial(apply_architecture, architecture)

  def in_xla(q, memories, index, weights, static):
    return xla(read, static, q, memories, index, weights)

  if choice in ("reference", "xla"):
    return in_xla(q, memories, index, weights, static)
  return _dispatch.run_spread(
    _NAME,
    choice,
    _read_kernels.of_rows(in_xla),
    {
      "mosaic_tpu": functools.partial(_mosaic_tpu, sizes),
      "triton": functools.partial(_read_triton.triton_selected, sizes),
    },
    {
      "mosaic_tpu": functools.partial(_mosaic_tpu_vjp, sizes),
      "triton": functools.partial(_read_triton.triton_selected_vjp, sizes),
    },
    (q, memories, index, weights, _read_kernels.on_rows(static, q)),
    (
      *("b t n k", _read_kernels.letters(memories)),
      *("b t n r", "b t n r", dict.fromkeys(static, "b n v")),
    ),
    "b t n v",
  )


def _why_not(sizes, q, index):
  reason = _read_kernels.why_not_network(sizes.architecture)
  if reason is not None:
    return reason
  module = _dispatch.kernel_module("cache_read.config")
  return module.selected_supports(_call(sizes, q, index))


def _call(sizes, q, index):
  return _selected_kernels.call(
    *(q, index, sizes.networks, sizes.value_dim), maps=sizes.maps
  )


def _reader(sizes, q):
  module = _dispatch.kernel_module("mlp_memory.selected")
  return module.networks(
    *(sizes.architecture.forward, q.shape[3], sizes.value_dim, q.dtype)
  )


def _mosaic_tpu(sizes, q, memories, index, weights, static):
  return _selected_kernels.forward(
    *(_reader(sizes, q), _call(sizes, q, index), q),
    *_read_kernels.matrices(memories, static),
    *(index, weights),
  )


def _mosaic_tpu_vjp(sizes, q, memories, index, weights, static, d_y):
  d_q, d_networks, d_static, d_weights = _selected_kernels.gradients(
    *(_reader(sizes, q), _call(sizes, q, index), q),
    *_read_kernels.matrices(memories, static),
    *(index, weights, d_y),
  )
  return (
    d_q,
    _read_kernels.as_memories(d_networks, memories),
    d_weights,
    {name: x[:, :, 0] for name, x in d_static.items()},
  )
