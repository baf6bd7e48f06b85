"""`read_networks`: gated reads of stored networks, each of them whole."""

import functools

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.cache_read import read_one_token
from memcache_jax.ops.mlp_memory import _read_kernels, _read_triton
from memcache_jax.ops.mlp_memory._architecture import (
  Architecture,
  apply_architecture,
  static_names,
)

_NAME = "read_networks"


def read_networks(
  architecture: Architecture,
  params: Params,
  memories: Params,
  q: Float[Array, "b t n k"],
  weights: Float[Array, "b t n s"],
  *,
  implementation: _dispatch.Implementation | None = None,
) -> Float[Array, "b t n v"]:
  r"""Reads many stored networks at once, each with its own gate.

  .. math:: y_t = \sum_i \gamma_{t,i}\, M_{\theta^{(i)}}(q_t)

  Memory Caching (arXiv 2602.24281), Eq. 9.

  Args:
    architecture: the network M.
    params: its parameters, of which only the static ones are read.
    memories: stored weights, leaves [b s n ...].
    q: queries; float32 or bfloat16.
    weights: gate of every token for every stored network.
    implementation: "mosaic_tpu", for networks of this library; "triton" (for
      GPUs; compiled but not yet run on one), for those of one hidden layer at
      most; "xla" and "reference" for a scan over the networks; or None for the
      fastest on the platform the program is compiled for.

  Returns:
    y in float32.

  Raises:
    ValueError: when shapes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, where it may run as a kernel: those are for "xla".
    TypeError: by JAX, on derivatives in forward mode there.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from memcache_jax.ops.mlp_memory import MLP, read_networks
    >>> net = MLP.matrix()
    >>> memories = {"w": jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])[None, :, None]}
    >>> q, weights = jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1, 2), 0.5)
    >>> read_networks(net, {}, memories, q, weights).tolist()
    [[[[2.0, 2.0]]]]
  """
  _checks.check_shapes(
    {
      "q": (q, "b t n k"),
      "weights": (weights, "b t n s"),
      **_read_kernels.shapes(memories),
    }
  )
  _checks.check_floating(q=q, weights=weights, **memories)
  static = {name: params[name] for name in static_names(architecture)}
  sizes = _read_kernels.sizes_of(architecture, q, memories, static)
  if implementation is None and q.shape[1] == 1:
    implementation = "xla"  # which moves nothing but the weights, once
  why_not = {}
  if implementation not in ("reference", "xla"):
    why_not = {
      "mosaic_tpu": _read_kernels.why_not(sizes),
      "triton": _read_triton.why_not(sizes),
    }
  choice = _dispatch.resolve(_NAME, implementation, why_not)
  one_by_one = functools.partial(_one_by_one, sizes)
  if choice in ("reference", "xla"):
    return one_by_one(q, memories, weights, static)
  return _dispatch.run_spread(
    _NAME,
    choice,
    _read_kernels.of_rows(one_by_one),
    {
      "mosaic_tpu": functools.partial(_read_kernels.mosaic_tpu, sizes),
      "triton": functools.partial(_read_triton.triton, sizes),
    },
    {
      "mosaic_tpu": functools.partial(_read_kernels.mosaic_tpu_vjp, sizes),
      "triton": functools.partial(_read_triton.triton_vjp, sizes),
    },
    (q, memories, weights, _read_kernels.on_rows(static, q)),
    (
      *("b t n k", _read_kernels.letters(memories), "b t n s"),
      dict.fromkeys(static, "b n v"),
    ),
    "b t n v",
  )


def _one_by_one(sizes, q, memories, weights, static):
  """A scan over stored networks, computed anew in the backward pass."""
  read = functools.partial(apply_architecture, sizes.architecture, static)
  if q.shape[1] == 1:
    return read_one_token(read, memories, q, weights)

  def add(y, inputs):
    memory, weight = inputs
    return y + weight[..., None] * read(memory, q).astype(jnp.float32), None

  memories = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), memories)
  inputs = (memories, jnp.moveaxis(weights, -1, 0))
  zero = sharding.zeros_at_tokens(q, sizes.value_dim)
  return jax.lax.scan(jax.checkpoint(add), zero, inputs)[0]
