"""The layers of this library that are timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from examples.benchmarks.cases import BATCH, DIM, HEADS, LONG, Case
from memcache_jax import numerics
from memcache_jax.caching import (
  Aggregator,
  Cached,
  Constant,
  GatedResidual,
  Residual,
  SparseSelective,
)
from memcache_jax.layers import MemoryMixer
from memcache_jax.memories import (
  GatedDelta,
  HeadShape,
  Linear,
  Memory,
  Tokens,
)

# The definitions of the ops, or the fastest there are.
Reference: TypeAlias = Literal["reference"] | None


@dataclass(frozen=True)
class Layer:
  """A layer as functions.

  Attributes:
    params: its weights.
    apply: y, state = apply(params, x[b t d], state or None).
    init_state: state = init_state(params, max_length).
  """

  params: PyTree
  apply: Callable
  init_state: Callable[[PyTree, int], PyTree]


def memory(case: Case, implementation: Reference = None) -> Memory:
  """The memory of a case; "reference" takes the definitions of its ops."""
  match case.memory:
    case "linear":
      inner = Linear(implementation=implementation)
    case "gated_delta":
      inner = GatedDelta(implementation=implementation)
  if case.aggregate == "none":
    return inner
  return Cached(
    inner, Constant(case.segment), aggregator(case.aggregate), case.write_mode
  )


def aggregator(
  name: str, pooling: Literal["mean", "sum"] = "mean"
) -> Aggregator:
  """An aggregator by the name it has in results."""
  match name:
    case "residual":
      return Residual()
    case "grm":
      return GatedResidual(pooling=pooling)
    case "ssc":
      return SparseSelective(top_k=2, pooling=pooling)
  raise ValueError(f"`name` must be residual, grm or ssc: got {name!r}.")


def build(case: Case, implementation: Reference = None) -> Layer:
  """The layer of a case; its weights depend on the case only."""
  match case.layer:
    case "bare":
      return bare(memory(case, implementation))
    case "mixer":
      return _mixer(memory(case, implementation))
  raise ValueError(f"`layer` must be bare or mixer: got {case.layer!r}.")


def bare(memory: Memory, params: PyTree | None = None) -> Layer:
  """Projections without bias around a memory, as the rivals have them."""
  names = ("q", "k", "v", *memory.gates(), "o")
  is_delta = "beta" in names
  if params is None:
    keys = jax.random.split(jax.random.key(0), len(names))
    width = lambda name: HEADS if name in ("beta", "log_decay") else DIM
    params = {
      name: jax.random.normal(key, (DIM, width(name))) * DIM**-0.5
      for name, key in zip(names, keys, strict=True)
    }

  def project(params, x, name):
    y = x @ params[name]
    match name:
      case "beta":
        return jax.nn.sigmoid(y)
      case "log_decay":
        return jax.nn.log_sigmoid(y + LONG)
    y = y.reshape(*x.shape[:2], HEADS, -1)
    return numerics.l2_normalize(y) if is_delta and name in "qk" else y

  def apply(params, x: Float[Array, "b t d"], state):
    q, k, v = (project(params, x, name) for name in "qkv")
    gates = {name: project(params, x, name) for name in memory.gates()}
    y, state = memory.scan({}, state, Tokens(q, k, v, gates))
    return y.reshape(x.shape) @ params["o"], state

  def init_state(params, max_length):
    del params
    shape = HeadShape(HEADS, DIM // HEADS, DIM // HEADS)
    return memory.init_state({}, shape, BATCH, max_length=max_length)

  return Layer(params, apply, init_state)


def _mixer(memory: Memory) -> Layer:
  mixer = MemoryMixer(DIM, HEADS, memory, rngs=nnx.Rngs(0))
  graph, params = nnx.split(mixer)

  def apply(params, x, state):
    return nnx.merge(graph, params)(x, state)

  def init_state(params, max_length):
    return nnx.merge(graph, params).init_state(BATCH, max_length)

  return Layer(params, apply, init_state)


def loss(y: Float[Array, "b t d"]) -> Float[Array, ""]:
  """The one that every library is timed with."""
  return jnp.mean(jnp.square(y))
