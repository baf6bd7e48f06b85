"""What memories that are a matrix per head have in common."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from memcache_jax import ops
from memcache_jax.array_typing import Array, Float, Gates, Int, Params, State
from memcache_jax.memories._base import Memory, Tokens
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops._dispatch import Implementation, of_op
from memcache_jax.ops.cache_read import selected_read


@dataclass(frozen=True, kw_only=True)
class MatrixMemory(Memory):
  """A matrix S per head, read as q S; what is written is for subclasses.

  Attributes:
    chunk_size: tokens computed in parallel; changes speed only.
    implementation: of its ops: "reference", "xla", a kernel for those that
      have it, or None for the fastest. Where kernels may run there is a first
      derivative only, in reverse; "xla" has all.
  """

  chunk_size: int = 64
  implementation: Implementation | None = None

  reads_linearly: ClassVar[bool] = True

  def __post_init__(self):
    _checks.check_positive(chunk_size=self.chunk_size)
    _dispatch.check_name(self.implementation)

  def step(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> State:
    gates = {name: gate[:, None] for name, gate in gates.items()}
    k, v = k[:, None], v[:, None]
    return self.scan(params, state, Tokens(k, k, v, gates))[1]

  def read(
    self, params: Params, memory: State, q: Float[Array, "b t n k"]
  ) -> Float[Array, "b t n v"]:
    one = jnp.ones((*q.shape[:3], 1), jnp.float32)
    return self.read_many(params, memory[:, None], q, one)

  def read_many(
    self,
    params: Params,
    memories: State,
    q: Float[Array, "b t n k"],
    weights: Float[Array, "b t n s"],
  ) -> Float[Array, "b t n v"]:
    del params
    return ops.cache_read(
      *(q, memories, weights),
      implementation=of_op(self.implementation, "mosaic_tpu", "triton"),
    )

  def read_selected(
    self,
    params: Params,
    memories: State,
    q: Float[Array, "b t n k"],
    index: Int[Array, "b t n r"],
    weights: Float[Array, "b t n r"],
    in_tiles: Callable[..., Float[Array, "b t n v"]],
  ) -> Float[Array, "b t n v"]:
    del params
    return selected_read(
      *(q, memories, index, weights),
      one_by_one=functools.partial(in_tiles, self.read, {}),
      implementation=of_op(self.implementation, "mosaic_tpu", "triton"),
    )
