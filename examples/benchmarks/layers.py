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
  MemorySoup,
  Residual,
  SparseSelective,
)
from memcache_jax.layers import MemoryMixer
from memcache_jax.memories import (
  DeepLinear,
  GatedDelta,
  HeadShape,
  Linear,
  Memory,
  Titans,
  Tokens,
)
from memcache_jax.ops.mlp_memory import MLP

# The definitions of the ops, or the fastest there are.
Reference: TypeAlias = Literal["reference"] | None

# As wide as those of the rivals: 64 for heads of 32.
NETWORK = MLP(depth=2, hidden_factor=2)


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
  options = {"implementation": implementation}
  if case.inner_batch:  # else the library's default
    options["inner_batch"] = case.inner_batch
  match case.memory:
    case "linear":
      inner = Linear(implementation=implementation)
    case "gated_delta":
      inner = GatedDelta(implementation=implementation)
    case "titans":
      inner = Titans(NETWORK, **options)
    case "delayed_titans":
      inner = Titans(NETWORK, delayed=True, **options)
    case "dla":
      inner = DeepLinear(NETWORK, **options)
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
    case "soup":
      return MemorySoup(pooling=pooling)
    case "ssc":
      return SparseSelective(top_k=2, pooling=pooling)
  raise ValueError(f"`name` must be residual, grm, soup or ssc: got {name!r}.")


def build(case: Case, implementation: Reference = None) -> Layer:
  """The layer of a case; its weights depend on the case only."""
  match case.layer:
    case "bare":
      return bare(memory(case, implementation))
    case "mixer":
      return _mixer(memory(case, implementation))
  raise ValueError(f"`layer` must be bare or mixer: got {case.layer!r}.")


def bare(memory: Memory, params: PyTree | None = None) -> Layer:
  """Projections without bias around a memory, as the rivals have them.

  Deep memories have learned parameters of their own, too. Queries and keys of
  all but linear memories are of unit length.
  """
  inner = memory.memory if isinstance(memory, Cached) else memory
  scalars = [name for name in inner.gates() if name != "u"]
  names = ("q", "k", "v", *memory.gates(), "o")
  shape = HeadShape(HEADS, DIM // HEADS, DIM // HEADS)
  if params is None:
    keys = jax.random.split(jax.random.key(0), len(names))
    width = lambda name: HEADS if name in scalars else DIM
    params = {
      name: jax.random.normal(key, (DIM, width(name))) * DIM**-0.5
      for name, key in zip(names, keys, strict=True)
    }
    if "step" in scalars:
      # Gates of deep memories in the middle of their range: with a momentum
      # near 1 they blow up the difference of two roundings.
      params |= {name: jnp.zeros((DIM, HEADS)) for name in scalars}
    params["memory"] = memory.init_params(jax.random.key(1), shape)

  def matmul(x, kernel):
    return numerics.matmul_tokens("d,de->e", x, kernel, dtype=jnp.float32)

  def project(params, x, name):
    y = matmul(x, params[name])
    if name == "log_decay":
      return jax.nn.log_sigmoid(y + LONG)
    if name in scalars:
      return inner.gates()[name].scale * jax.nn.sigmoid(y)
    y = y.reshape(*x.shape[:2], HEADS, -1)
    return numerics.l2_normalize(y) if scalars and name in "qk" else y

  def apply(params, x: Float[Array, "b t d"], state):
    gates = {name: project(params, x, name) for name in memory.gates()}
    q, k, v = (project(params, x, name) for name in "qkv")
    tokens = Tokens(q, k, v, gates)
    y, state = memory.scan(params.get("memory", {}), state, tokens)
    return matmul(y.reshape(x.shape), params["o"]), state

  def init_state(params, max_length):
    return memory.init_state(
      params.get("memory", {}), shape, BATCH, max_length=max_length
    )

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
