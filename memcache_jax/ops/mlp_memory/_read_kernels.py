"""Between reads of stored networks and their kernels: sizes, layouts."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params
from memcache_jax.ops import _dispatch
from memcache_jax.ops.mlp_memory._architecture import (
  MLP,
  Architecture,
  GatedMLP,
  apply_architecture,
  is_bias,
)


@dataclass(frozen=True)
class Sizes:
  """Of a call.

  Attributes:
    architecture: the network.
    key_dim: its input.
    value_dim: its output.
    networks: stored ones.
    tokens: of the call.
    dtype: of queries.
  """

  architecture: Architecture
  key_dim: int
  value_dim: int
  networks: int
  tokens: int
  dtype: str

  @property
  def maps(self) -> tuple[tuple[int, int], ...]:
    maps = self.architecture.affine_maps(self.key_dim, self.value_dim)
    return tuple((x.in_dim, x.out_dim) for x in maps.values())


def sizes_of(
  architecture: Architecture,
  q: Float[Array, "b t n k"],
  memories: Params,
  static: Params,
) -> Sizes:
  read = lambda *arrays: apply_architecture(architecture, *arrays)
  # Shapes alone: memories may lie on the host, where nothing reads them.
  plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  first = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype),
    memories,
  )
  return Sizes(
    architecture,
    key_dim=q.shape[-1],
    value_dim=jax.eval_shape(
      read, jax.tree.map(plain, static), first, plain(q)
    ).shape[-1],
    networks=jax.tree.leaves(memories)[0].shape[1],
    tokens=q.shape[1],
    dtype=q.dtype.name,
  )


def why_not_network(architecture: Architecture) -> str | None:
  """Why no kernel can read a network; None if one may."""
  if (reason := _dispatch.why_not_installed()) is not None:
    return reason
  if type(architecture) not in (MLP, GatedMLP):
    return "a network of one's own may do what a kernel cannot"
  return None


def why_not(sizes: Sizes) -> str | None:
  """Why the kernels cannot take a call that reads all; None if they can."""
  if (reason := why_not_network(sizes.architecture)) is not None:
    return reason
  module = _dispatch.kernel_module("mlp_memory.config")
  return module.supports(call_of(module, sizes))


def call_of(module: ModuleType, sizes: Sizes) -> Any:
  """The kernels' `Call`."""
  return module.Call(
    maps=sizes.maps,
    k=sizes.key_dim,
    v=sizes.value_dim,
    dtype=sizes.dtype,
    tokens=sizes.tokens,
    networks=sizes.networks,
  )


def shapes(memories: Params) -> dict[str, tuple[Array, str]]:
  """What `check_shapes` is told about stored networks."""
  matrix = "b s n {0}_in {0}_out"
  return {
    f"memories[{name!r}]": (
      x,
      matrix.format(name) if x.ndim == 5 else f"b s n {name}_width",
    )
    for name, x in memories.items()
  }


def letters(memories: Params) -> dict[str, str]:
  """Of the axes of stored networks."""
  return {
    name: "b s n i o" if x.ndim == 5 else "b s n o"
    for name, x in memories.items()
  }


def on_rows(static: Params, q: Float[Array, "b t n k"]) -> Params:
  """Static parameters [b n v], one copy for each row.

  What rows share would be summed up on each device alone.
  """
  rows = lambda x: sharding.zeros_at_tokens(q[:, 0], x.shape[-1])
  return {
    name: rows(x) + x.astype(jnp.float32)[None] for name, x in static.items()
  }


def of_rows(read: Callable[..., Array]) -> Callable[..., Array]:
  """A function of static parameters, last, as one of `on_rows`."""

  def run(*args):
    *inputs, static = args
    # All rows have the same ones.
    return read(*inputs, {name: x[0] for name, x in static.items()})

  return run


def mosaic_tpu(
  sizes: Sizes,
  q: Float[Array, "b t n k"],
  memories: Params,
  weights: Float[Array, "b t n s"],
  static: Params,
) -> Float[Array, "b t n v"]:
  """`read_networks`, as a kernel for TPUs."""
  pieces = _dispatch.kernel_module("mlp_memory.config")
  config = pieces.config(call_of(pieces, sizes))
  y = _dispatch.kernel_module("mlp_memory.mosaic_tpu").fwd(
    sizes.architecture.forward,
    _fill(rearrange(q, "b t n k -> b n t k"), 2, config.rows),
    *matrices(memories, static),
    _fill(_states_first(weights), 3, config.rows)[:, :, :, None],
    width=sizes.value_dim,
    config=config,
  )
  return rearrange(y, "b n t v -> b t n v")[:, : sizes.tokens]


def mosaic_tpu_vjp(
  sizes: Sizes,
  q: Float[Array, "b t n k"],
  memories: Params,
  weights: Float[Array, "b t n s"],
  static: Params,
  d_y: Float[Array, "b t n v"],
) -> tuple[Float[Array, "b t n k"], Params, Float[Array, "b t n s"], Params]:
  """Its gradients."""
  pieces = _dispatch.kernel_module("mlp_memory.config")
  config = pieces.gradient_config(call_of(pieces, sizes))
  module = _dispatch.kernel_module("mlp_memory.mosaic_tpu_vjp")
  networks, shared = matrices(memories, static)

  def run(q, gates, d_y):
    return module.bwd(
      *(sizes.architecture.forward, q, networks, shared),
      *(gates[:, :, :, None], d_y),
      config=config,
    )

  d_q, d_networks, d_shared, d_gates = _by_spans(
    run,
    _fill(rearrange(q, "b t n k -> b n t k"), 2, config.tokens),
    _fill(_states_first(weights), 3, config.tokens),
    _fill(
      rearrange(d_y.astype(q.dtype), "b t n v -> b n t v"), 2, config.tokens
    ),
    config.tokens,
  )
  d_weights = rearrange(d_gates, "b n s t -> b t n s")[:, : sizes.tokens]
  return (
    rearrange(d_q, "b n t k -> b t n k")[:, : sizes.tokens],
    as_memories(d_networks, memories),
    d_weights.astype(weights.dtype),
    {name: x[:, :, 0] for name, x in d_shared.items()},
  )


def _by_spans(run, q, gates, d_y, size):
  """Gradients of as many tokens at a time as fast memory has room for."""
  spans = q.shape[2] // size
  if spans == 1:
    d_q, d_networks, d_shared, d_gates = run(q, gates, d_y)
    return d_q, d_networks, d_shared, d_gates[:, :, :, 0]

  def span(sums, inputs):
    d_q, d_networks, d_shared, d_gates = run(*inputs)
    sums = jax.tree.map(jnp.add, sums, (d_networks, d_shared))
    return sums, (d_q, d_gates[:, :, :, 0])

  inputs = (
    rearrange(q, "b n (g t) k -> g b n t k", t=size),
    rearrange(gates, "b n s (g t) -> g b n s t", t=size),
    rearrange(d_y, "b n (g t) v -> g b n t v", t=size),
  )
  first = jax.tree.map(lambda x: x[0], inputs)
  sums = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *first)[1:3]
  )
  sums, (d_q, d_gates) = jax.lax.scan(span, sums, inputs)
  return (
    rearrange(d_q, "g b n t k -> b n (g t) k"),
    *sums,
    rearrange(d_gates, "g b n s t -> b n s (g t)"),
  )


def matrices(memories: Params, static: Params) -> tuple[Params, Params]:
  """Networks and static parameters, with a row where they are vectors."""
  networks = {
    name: x[:, :, :, None] if is_bias(name) else x
    for name, x in memories.items()
  }
  return networks, {name: x[:, :, None] for name, x in static.items()}


def as_memories(networks: Params, like: Params) -> Params:
  """`matrices` of networks undone, in the dtypes of what they were."""
  return {
    name: (x[:, :, :, 0] if is_bias(name) else x).astype(like[name].dtype)
    for name, x in networks.items()
  }


def _states_first(weights) -> Any:
  return rearrange(weights.astype(jnp.float32), "b t n s -> b n s t")


def _fill(x, axis, multiple):
  missing = [(0, 0)] * x.ndim
  missing[axis] = (0, -x.shape[axis] % multiple)
  return jnp.pad(x, missing)
