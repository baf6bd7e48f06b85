"""`read_networks`: gated reads of stored networks, each of them whole."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.cache_read import read_one_token
from memcache_jax.ops.mlp_memory._architecture import (
  MLP,
  AffineShape,
  Architecture,
  GatedMLP,
  apply_architecture,
  bias_name,
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

  Memory Caching (arXiv 2602.24281), Eq. 9. On a TPU the forward pass may run
  as a kernel; gradients are those of the XLA form.

  Args:
    architecture: the network M.
    params: its parameters, of which only the static ones are read.
    memories: stored weights, leaves [b s n ...].
    q: queries; float32 or bfloat16.
    weights: gate of every token for every stored network.
    implementation: "mosaic_tpu", for networks of this library; "xla" and
      "reference" for a scan over the networks; or None for the fastest on the
      platform the program is compiled for.

  Returns:
    y in float32.

  Raises:
    ValueError: when shapes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on derivatives other than a first one in reverse, where it may run as a
      kernel: those are for "xla".

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
      **{
        f"memories[{name!r}]": (
          x,
          f"b s n {name}_in {name}_out"
          if x.ndim == 5
          else f"b s n {name}_width",
        )
        for name, x in memories.items()
      },
    }
  )
  _checks.check_floating(q=q, weights=weights, **memories)
  static = {name: params[name] for name in static_names(architecture)}
  network = _network(architecture, q, memories, static)
  if implementation is None and q.shape[1] == 1:
    implementation = "xla"  # which moves nothing but the weights, once
  why_not = None
  if implementation in (None, "mosaic_tpu"):
    why_not = _why_not(network, q, weights)
  choice = _dispatch.resolve(_NAME, implementation, {"mosaic_tpu": why_not})
  if choice in ("reference", "xla"):
    return _one_by_one(network, q, memories, weights, static)
  return _dispatch.run_spread(
    _NAME,
    choice,
    functools.partial(_one_by_one, network),
    {"mosaic_tpu": functools.partial(_mosaic_tpu, network)},
    None,
    (q, memories, weights, static),
    _axes(memories, static),
    "b t n v",
  )


@dataclass(frozen=True)
class _Network:
  architecture: Architecture
  value_dim: int

  def maps(self, key_dim: int) -> Mapping[str, AffineShape]:
    return self.architecture.affine_maps(key_dim, self.value_dim)


def _network(architecture, q, memories, static):
  first = jax.tree.map(lambda x: x[:, 0], memories)
  read = functools.partial(apply_architecture, architecture)
  return _Network(
    architecture, jax.eval_shape(read, static, first, q).shape[-1]
  )


def _one_by_one(network, q, memories, weights, static):
  """A scan over stored networks, computed anew in the backward pass."""

  read = functools.partial(apply_architecture, network.architecture, static)
  if q.shape[1] == 1:
    return read_one_token(read, memories, q, weights)

  def add(y, inputs):
    memory, weight = inputs
    return y + weight[..., None] * read(memory, q).astype(jnp.float32), None

  memories = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), memories)
  inputs = (memories, jnp.moveaxis(weights, -1, 0))
  zero = sharding.zeros_at_tokens(q, network.value_dim)
  return jax.lax.scan(jax.checkpoint(add), zero, inputs)[0]


def _axes(memories, static):
  stored = {
    name: "b s n i o" if x.ndim == 5 else "b s n o"
    for name, x in memories.items()
  }
  return "b t n k", stored, "b t n s", dict.fromkeys(static, "n v")


def _why_not(network, q, weights):
  if (reason := _dispatch.why_not_installed()) is not None:
    return reason
  if type(network.architecture) not in (MLP, GatedMLP):
    return "a network of one's own may do what a kernel cannot"
  module = _dispatch.kernel_module("mlp_memory.config")
  return module.supports(_call(module, network, q, weights))


def _call(module, network, q, weights):
  maps = network.maps(q.shape[-1]).values()
  return module.Call(
    maps=tuple((x.in_dim, x.out_dim) for x in maps),
    k=q.shape[-1],
    v=network.value_dim,
    dtype=q.dtype.name,
    tokens=q.shape[1],
    networks=weights.shape[-1],
  )


def _mosaic_tpu(network, q, memories, weights, static):
  pieces = _dispatch.kernel_module("mlp_memory.config")
  config = pieces.config(_call(pieces, network, q, weights))
  missing = -q.shape[1] % config.rows
  maps = network.maps(q.shape[-1])
  biases = {
    name: memories[bias_name(name)][:, :, :, None]
    for name, size in maps.items()
    if size.bias
  }
  y = _dispatch.kernel_module("mlp_memory.mosaic_tpu").fwd(
    network.architecture.forward,
    jnp.pad(
      rearrange(q, "b t n k -> b n t k"),
      [(0, 0), (0, 0), (0, missing), (0, 0)],
    ),
    {name: memories[name] for name in maps},
    biases,
    {name: x.astype(jnp.float32)[:, None] for name, x in static.items()},
    jnp.pad(
      rearrange(weights.astype(jnp.float32), "b t n s -> b n s t"),
      [(0, 0), (0, 0), (0, 0), (0, missing)],
    ),
    width=network.value_dim,
    config=config,
  )
  return rearrange(y, "b n t v -> b t n v")[:, : q.shape[1]]
