"""Reading only the memories that each token selected.

A pair of a token and a memory it selected is the unit of work. Pairs are
sorted by memory and cut into tiles of one memory each, so that every tile is
one read of many queries, whatever the memory is; then pairs go back to their
tokens.
"""

import functools

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Float, Params, State
from memcache_jax.caching import _host
from memcache_jax.caching._aggregators import Selection
from memcache_jax.memories._base import Memory
from memcache_jax.ops.cache_read._plan import make_plan, tile_size


def read_selected(
  memory: Memory,
  params: Params,
  memories: State,
  q: Float[Array, "b t n k"],
  selection: Selection,
) -> Float[Array, "b t n v"]:
  """Sum of the reads of r memories per token and head, gated; float32.

  Like `Memory.read_many` with zeros for all other memories, whose reads are
  not computed.

  Args:
    memory: the memory.
    params: its parameters.
    memories: stored ones, leaves [b s n ...].
    q: queries.
    selection: which of them each token and head reads, without repetition.
  """
  index, weights, _, others = selection
  y = memory.read_selected(params, memories, q, index, weights, _read)
  # What is on the host is not for training.
  if others is None or _host.is_on_host(memories):
    return y
  return y + _read_backwards(memory, params, memories, q, others)


def _read_backwards(memory, params, memories, q, weights):
  """Reads of memories whose weights are 0, for the gradient of the weights.

  It alone is not 0, and what it takes is read in the backward pass only.
  """
  out = jax.eval_shape(memory.read_many, params, memories, q, weights)

  @jax.custom_vjp
  def read(params, memories, q, weights):
    del params, memories, weights
    return sharding.zeros_at_tokens(q, out.shape[-1])

  def forward(*inputs):
    return read(*inputs), inputs

  def backward(inputs, g):
    params, memories, q, weights = inputs
    by_weights = functools.partial(memory.read_many, params, memories, q)
    return None, None, None, *jax.vjp(by_weights, weights)[1](g)

  read.defvjp(forward, backward)
  return read(params, memories, q, weights)


def _read(read, params, q, memories, index, weights):
  """`read_selected` by `read` of any memory, with gathers."""
  b, t, n, r = index.shape
  slots = jax.tree.leaves(memories)[0].shape[1]
  tile = tile_size(t * r, slots)
  if tile == 1:
    reads = _read_pairs(read, params, memories, q, index)
  else:
    plan = make_plan(index, slots, tile)
    queries = _to_places(_heads_first(q), plan)
    reads = _read_tiles(read, params, memories, queries, plan.memory)
    reads = _to_pairs(reads, plan).reshape(b, n, t, r, -1)
    reads = jnp.transpose(reads, (0, 2, 1, 3, 4))
  # Selected before the product: what was not chosen may be nan.
  reads = jnp.where((index >= 0)[..., None], reads, 0.0)
  return jnp.einsum("btnr,btnrv->btnv", weights, reads)


def _read_pairs(read, params, memories, q, index):
  """Every pair with a memory of its own: few tokens, as in decoding."""
  b, t, n, r = index.shape
  pairs = jnp.transpose(index, (0, 1, 3, 2)).reshape(b, t * r, n)
  chosen = _take_memories(memories, pairs)
  q = jnp.broadcast_to(q[:, :, None], (b, t, r, n, q.shape[-1]))
  y = read(params, chosen, q.reshape(b * t * r, 1, n, -1))
  y = y.astype(jnp.float32).reshape(b, t, r, n, -1)
  return jnp.swapaxes(y, 2, 3)


def _read_tiles(read, params, memories, queries, index):
  """[b p n c k] -> [b p n c v]; computed anew in the backward pass."""
  b, p, n, c, k = queries.shape

  @jax.checkpoint
  def read_all(params, memories, queries):
    chosen = _take_memories(memories, index)
    queries = jnp.swapaxes(queries, 2, 3).reshape(b * p, c, n, k)
    return read(params, chosen, queries)

  y = read_all(params, memories, queries).astype(jnp.float32)
  return jnp.swapaxes(y.reshape(b, p, c, n, -1), 2, 3)


def _take_memories(memories, index):
  """Leaves [b s n ...], index [b p n] -> [(b p) n ...]: one per head."""
  b, p, n = index.shape

  # Not a mapped x[i], which would lay all memories out anew, heads first.
  take = functools.partial(jnp.take_along_axis, axis=1, mode="clip")

  def one(x):
    where = index.reshape(b, p, n, *(1,) * (x.ndim - 3))
    x = _host.to_device(_host.where_it_lies(take, x, where))
    return x.reshape(b * p, *x.shape[2:])

  return jax.tree.map(one, memories)


def _heads_first(x):
  return jnp.swapaxes(x, 1, 2)


def _rows(x, index):
  """x [b n m k], index [b n ...] -> [b n ... k]; zeros where it is -1."""
  take = jax.vmap(jax.vmap(lambda x, i: x[jnp.maximum(i, 0)]))
  return jnp.where((index >= 0)[..., None], take(x, index), 0)


# The two moves are each other's transpose, and no place holds two pairs: both
# gradients are gathers again, where those of a gather would be scatters. What
# they move by is an argument: nothing traced may be closed over.
def _to_places(q, plan):
  """Queries [b n t k] of pairs in tiles [b p n c k]."""
  b, n, t, k = q.shape
  places = _move_to_places(plan.place.shape[-1] // t, q, plan)
  tiles = plan.memory.shape[1]
  return jnp.swapaxes(places.reshape(b, n, tiles, -1, k), 1, 2)


def _to_pairs(y, plan):
  """Reads of tiles [b p n c v] -> those of pairs [b n j v]."""
  b, p, n, c, v = y.shape
  return _move_to_pairs(jnp.swapaxes(y, 1, 2).reshape(b, n, p * c, v), plan)


def _rows_of_places(pairs_of_token, q, plan):
  return _rows(q, jnp.where(plan.pair < 0, -1, plan.pair // pairs_of_token))


def _gradient_at_tokens(pairs_of_token, plan, g):
  b, n, _, k = g.shape
  g = jnp.reshape(_rows(g, plan.place), (b, n, -1, pairs_of_token, k))
  return jnp.sum(g, axis=3, dtype=jnp.float32).astype(g.dtype), None


_move_to_places = jax.custom_vjp(_rows_of_places, nondiff_argnums=(0,))
_move_to_places.defvjp(
  lambda r, q, plan: (_rows_of_places(r, q, plan), plan), _gradient_at_tokens
)


@jax.custom_vjp
def _move_to_pairs(y, plan):
  return _rows(y, plan.place)


_move_to_pairs.defvjp(
  lambda y, plan: (_move_to_pairs(y, plan), plan),
  lambda plan, g: (_rows(g, plan.pair), None),
)
