"""The language models of `throughput`: small, and alike but for the mixer."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from examples.benchmarks import check, jax_attention
from memcache_jax.caching import (
  Aggregator,
  Cached,
  Constant,
  GatedResidual,
  MemorySoup,
  SparseSelective,
)
from memcache_jax.layers import AttentionState
from memcache_jax.memories import (
  DeepLinear,
  Linear,
  Memory,
  SlidingWindowLinear,
  Titans,
)
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  ModelConfig,
  next_token_loss,
)
from memcache_jax.ops.mlp_memory import MLP

TRANSFORMER = "Transformer++"
MEMORIES = ("linear", "SWLA", "DLA", "Titans")
# Soup over a linear memory is GRM over it.
CACHED = (
  *("linear, GRM", "linear, SSC"),
  *("Titans, GRM", "Titans, Soup", "Titans, SSC"),
)
NAMES = (TRANSFORMER, *MEMORIES, *CACHED)

# Networks as in `layers`.
NETWORK = MLP(depth=2, hidden_factor=2)
VOCAB = 256


@dataclass(frozen=True)
class Sizes:
  """What all of the models share.

  Attributes:
    dim: width.
    num_heads: heads.
    num_layers: blocks, each with a feed-forward layer.
    segment: tokens per cached memory.
    piece: tokens that a prompt is read by, a multiple of the segment.
    checked: tokens to compare with the definition on.
  """

  dim: int = 128
  num_heads: int = 4
  num_layers: int = 2
  segment: int = 256
  piece: int = 1024
  checked: int = 576


Implementation = Literal["reference"] | None


def config(
  name: str, sizes: Sizes, implementation: Implementation = None
) -> ModelConfig:
  """A model by its name; "reference" takes the definitions of its ops."""
  if name != TRANSFORMER:
    memory = _memory(name, sizes, implementation)
    mixer = MemorySpec(memory, sizes.num_heads)
  elif implementation is None:
    mixer = jax_attention.JaxAttentionSpec(sizes.num_heads)
  else:
    mixer = AttentionSpec(sizes.num_heads)
  return ModelConfig(
    vocab_size=VOCAB,
    dim=sizes.dim,
    num_layers=sizes.num_layers,
    pattern=(mixer,),
    hidden_dim=2 * sizes.dim,
  )


def _memory(name: str, sizes: Sizes, implementation: Implementation) -> Memory:
  base, _, aggregate = name.partition(", ")
  match base:
    case "linear":
      memory = Linear(implementation=implementation)
    case "SWLA":
      memory = SlidingWindowLinear(implementation=implementation)
    case "DLA":
      memory = DeepLinear(NETWORK, implementation=implementation)
    case "Titans":
      memory = Titans(NETWORK, implementation=implementation)
    case _:
      raise ValueError(f"`name` must be one of {NAMES}: got {name!r}.")
  if not aggregate:
    return memory
  aggregators: dict[str, Aggregator] = {
    "GRM": GatedResidual(),
    "Soup": MemorySoup(),
    "SSC": SparseSelective(top_k=2),
  }
  return Cached(memory, Constant(sizes.segment), aggregators[aggregate])


@dataclass(frozen=True)
class Functions:
  """A model as functions of its weights.

  Attributes:
    params: weights.
    gradient: loss and its gradient = gradient(params, ids [b t+1]).
    read: logits [b t vocab], state = read(params, ids [b t], state).
    init_state: state = init_state(params, tokens), with room for so many.
  """

  params: PyTree
  gradient: jax.stages.Wrapped
  read: jax.stages.Wrapped
  init_state: jax.stages.Wrapped


def functions(made: ModelConfig) -> Functions:
  """A model with weights that depend on its config alone."""
  graph, params = nnx.split(LanguageModel(made, rngs=nnx.Rngs(0)))

  def loss(params, ids):
    logits, _ = nnx.merge(graph, params)(ids[:, :-1])
    return next_token_loss(logits, ids[:, 1:])

  def read(params, ids, state):
    return nnx.merge(graph, params)(ids, state)

  def init_state(params, tokens):
    return nnx.merge(graph, params).init_state(1, tokens)

  return Functions(
    params,
    jax.jit(jax.value_and_grad(loss)),
    jax.jit(read, donate_argnames="state"),
    jax.jit(init_state, static_argnames="tokens"),
  )


def ids(tokens: int) -> Int[Array, "1 t"]:
  """Random ids."""
  return jax.random.randint(jax.random.key(1), (1, tokens), 0, VOCAB)


def after(made: Functions, sizes: Sizes, tokens: int, room: int) -> PyTree:
  """The state of a model that has read so many tokens.

  Args:
    made: the model.
    sizes: of it.
    tokens: how many, a multiple of `sizes.piece` or less than that.
    room: tokens it has room for besides.
  """
  state = made.init_state(made.params, tokens + room)
  if isinstance(state[0], AttentionState):
    return tuple(jax_attention.filled(layer, tokens) for layer in state)
  piece = min(tokens, sizes.piece)
  text = ids(tokens)
  for start in range(0, tokens, piece):
    _, state = made.read(made.params, text[:, start : start + piece], state)
  return state


def errors(
  made: Functions, definition: Functions, sizes: Sizes
) -> dict[str, float]:
  """How far loss, gradient and decoding are off the definition.

  Args:
    made: what is timed.
    definition: the same model with the definitions of its ops, which is called
      once per token.
    sizes: of both.
  """
  text = ids(sizes.checked + 1)

  def loss(params):
    logits = _by_token(definition, params, text[:, :-1])
    return next_token_loss(logits, text[:, 1:]), logits

  # Less optimised: it runs only once.
  program = jax.jit(jax.value_and_grad(loss, has_aux=True))
  options: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}
  program = program.lower(made.params).compile(options)
  (wanted_loss, wanted), wanted_gradient = program(made.params)
  value, gradient = made.gradient(made.params, text)
  # Most of the text at once, and then a token at a time.
  last = 8
  state = made.init_state(made.params, sizes.checked)
  _, state = made.read(made.params, text[:, : sizes.checked - last], state)
  steps = []
  for place in range(sizes.checked - last, sizes.checked):
    one = text[:, place : place + 1]
    logits, state = made.read(made.params, one, state)
    steps.append(logits)
  return {
    "loss": check.worst_error(value, wanted_loss),
    "gradient": check.worst_error(gradient, wanted_gradient),
    "decode": check.worst_error(
      jnp.concatenate(steps, axis=1), wanted[:, -last:]
    ),
  }


def _by_token(
  definition: Functions, params: PyTree, text: Int[Array, "1 t"]
) -> Float[Array, "1 t vocab"]:
  layer = check.Layer(
    params,
    lambda params, x, state: definition.read(params, x[..., 0], state),
    definition.init_state,
  )
  return check.by_token(layer, params, text[..., None])
