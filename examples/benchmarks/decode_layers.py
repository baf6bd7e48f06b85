"""The layers whose decode steps are timed, their checks, and their states."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from examples.benchmarks import check, layers
from examples.benchmarks.layers import Layer, Reference
from memcache_jax.caching import Cached, CacheState, Constant
from memcache_jax.layers import Attention, MemoryMixer
from memcache_jax.memories import DeepLinear, Linear

DIM, HEADS, SEGMENT = 512, 8, 64
# Room beyond the context, for the tokens that are timed.
AHEAD = 2 * SEGMENT
# Two segments and a part, in a cache so large that few of its memories are
# selected, read in pieces of these lengths.
CHECKED, CHECKED_ROOM = 141, 32 * SEGMENT
PIECES = (70, 1, 70)


def build(
  memory: str, aggregate: str, implementation: Reference = None
) -> Layer:
  """A full layer with this memory, or attention; the same weights each time."""
  rngs = nnx.Rngs(0)
  match memory:
    case "attention":
      return _as_functions(Attention(DIM, HEADS, rngs=rngs))
    case "linear":
      inner = Linear(implementation=implementation)
    case "dla":
      inner = DeepLinear(layers.NETWORK, implementation=implementation)
    case _:
      raise ValueError(f"`memory` must be linear, dla or attention: {memory!r}")
  if aggregate != "none":
    how = layers.aggregator(aggregate)
    inner = Cached(inner, Constant(SEGMENT), how)
  return _as_functions(MemoryMixer(DIM, HEADS, inner, rngs=rngs))


def _as_functions(mixer: Any) -> Layer:
  graph, params = nnx.split(mixer)

  def apply(params, x, state):
    return nnx.merge(graph, params)(x, state)

  def init_state(params, max_length):
    return nnx.merge(graph, params).init_state(1, max_length)

  return Layer(params, apply, init_state)


def errors(layer: Layer, definition: Layer) -> dict[str, float]:
  """How far steps and pieces are off, and what states hold beyond their due.

  Args:
    layer: what is to be timed.
    definition: the same with the definitions of its ops.
  """
  x = jax.random.normal(jax.random.key(9), (1, CHECKED, DIM))
  read = jax.jit(layer.apply, donate_argnums=2)

  def in_pieces(lengths):
    state, ys, begin = layer.init_state(layer.params, CHECKED_ROOM), [], 0
    for length in lengths:
      y, state = read(layer.params, x[:, begin : begin + length], state)
      ys.append(y)
      begin += length
    return jnp.concatenate(ys, axis=1), state

  whole, state = in_pieces([CHECKED])
  wanted = whole  # attention has no other definition than its parallel form
  if hasattr(state, "memory"):
    by_token = functools.partial(check.by_token, definition)
    program = jax.jit(by_token).lower(definition.params, x)
    # Less optimised: it runs only once.
    options: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}
    wanted = program.compile(options)(definition.params, x)
  found = {"whole": check.worst_error(whole, wanted)}
  for name, lengths in (("pieces", PIECES), ("steps", (1,) * CHECKED)):
    y, other = in_pieces(lengths)
    found[name] = check.worst_error(y, wanted)
    found[f"state after {name}"] = check.worst_error(
      _floats(other), _floats(state)
    )
    found[f"counters after {name}"] = float(not _alike(other, state))
  like = after(layer, CHECKED, CHECKED_ROOM)
  found["simulated counters"] = float(not _alike(like, state))
  found["growth"] = float(not _grows_by_one_memory(layer))
  return found


def after(layer: Layer, context: int, room: int | None = None) -> PyTree:
  """A state as after `context` tokens: its counters, and random numbers.

  What a step does depends on nothing else, and long texts need not be read.
  """
  room = context + AHEAD if room is None else room
  state = layer.init_state(layer.params, room)
  cached = isinstance(getattr(state, "memory", None), CacheState)
  keys = iter(jax.random.split(jax.random.key(1), 99))

  def fill(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
      return 0.1 * jax.random.normal(next(keys), x.shape, x.dtype)
    # Tokens of the document, or of its open segment.
    return jnp.full_like(x, context % SEGMENT if cached else context)

  state = jax.tree.map(fill, state)
  if not cached:
    return state
  done = context // SEGMENT
  slot = jnp.arange(state.memory.index.shape[1], dtype=jnp.int32)[None]
  return state._replace(
    memory=state.memory._replace(
      index=jnp.where(slot < done, slot, -1),
      count=jnp.full_like(state.memory.count, done),
    )
  )


def _grows_by_one_memory(layer: Layer) -> bool:
  """Whether a segment more takes one memory, its key and its number."""
  sizes = []
  for segments in (16, 17):
    state = layer.init_state(layer.params, segments * SEGMENT)
    sizes.append(sum(x.nbytes for x in jax.tree.leaves(state)))
  cache = getattr(state, "memory", None)
  if not isinstance(cache, CacheState):
    rows = SEGMENT * 2 * DIM * 4  # keys and values of attention
    return sizes[1] - sizes[0] == (0 if hasattr(state, "memory") else rows)
  one = (cache.memories, cache.keys, cache.index)
  one = sum(x[:, 0].nbytes for x in jax.tree.leaves(one))
  return sizes[1] - sizes[0] == one


def _floats(tree):
  leaves = jax.tree.leaves(tree)
  return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _alike(a, b) -> bool:
  """Whether shapes, dtypes and counters are the same."""

  def same(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
      return False
    floating = jnp.issubdtype(a.dtype, jnp.floating)
    return bool(floating or np.array_equal(a, b))

  return all(jax.tree.leaves(jax.tree.map(same, a, b)))
