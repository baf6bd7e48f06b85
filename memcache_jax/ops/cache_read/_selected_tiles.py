"""Reads of selected states in XLA: one product per tile of queries.

With pairs in tiles, of which each has a state S, and rows of tokens moved to
the places of their pairs,

  y_t = sum_r w_tr (Q S)[tr],         dQ = G S^T,     dS = (w Q)^T G,
  dq_t = sum_r w_tr dQ[tr],           dw_tr = <q_t, dQ[tr]>.

All moves are gathers, and no array of places is kept for the backward pass.
"""

import jax
import jax.numpy as jnp

from memcache_jax import numerics
from memcache_jax.array_typing import Array, Float, Int
from memcache_jax.ops._heads import by_heads
from memcache_jax.ops.cache_read._plan import Plan, make_plan, tile_size


def selected_read(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
) -> Float[Array, "b t n v"]:
  """`selected_read`, a tile of queries at a time."""
  t, r = index.shape[1], index.shape[3]
  slots = states.shape[1]
  plan = make_plan(index, slots, tile_size(t * r, slots))
  b, n = plan.place.shape[:2]
  places = jnp.swapaxes(plan.place.reshape(b, n, t, r), 1, 2)
  pairs = jnp.swapaxes(plan.pair, 1, 2)
  return _read(q, states, weights, Plan(plan.memory, pairs, places))


@jax.custom_vjp
def _read(q, states, weights, plan):
  return by_heads(_read_head, q, states, weights, plan)


def _gradients(inputs, g):
  return *by_heads(_gradients_of_head, *inputs, g), None


_read.defvjp(lambda *inputs: (_read(*inputs), inputs), _gradients)


def _read_head(q, states, weights, plan):
  """Of q [b t k], states [b s k v], weights [b t r] and the head's plan."""
  b, tiles = plan.memory.shape
  token = plan.pair // weights.shape[2]
  queries = _rows(q, token).reshape(b, tiles, -1, q.shape[2])
  reads = _products(queries, _states(states, plan), q.dtype)
  reads = reads.reshape(b, -1, reads.shape[3])
  return _sum_of_pairs(reads, weights, plan)


def _gradients_of_head(q, states, weights, plan, g):
  b, tiles = plan.memory.shape
  token = plan.pair // weights.shape[2]
  in_tiles = lambda x: x.reshape(b, tiles, -1, x.shape[2])
  g_tiles = in_tiles(_rows(g, token))
  transposed = jnp.swapaxes(states, 2, 3)
  d_queries = _products(g_tiles, _states(transposed, plan), g.dtype)
  d_queries = d_queries.reshape(b, -1, q.shape[2])

  flat = weights.reshape(b, -1)[..., None]
  weighed = _rows(q, token).astype(g.dtype) * _rows(flat, plan.pair)
  d_tiles = _products(jnp.swapaxes(in_tiles(weighed), 2, 3), g_tiles, g.dtype)
  add = lambda zero, i, x: zero.at[i].add(x)
  d_states = jax.vmap(add)(jnp.zeros_like(states), plan.memory, d_tiles)

  d_q = _sum_of_pairs(d_queries, weights, plan).astype(q.dtype)
  # Products with vectors: a sum of products takes several times as long.
  d_pairs = _rows(d_queries, plan.place)
  d_weights = jnp.einsum("btk,btrk->btr", q.astype(g.dtype), d_pairs)
  return d_q, d_states, d_weights.astype(weights.dtype)


def _rows(x, index):
  """x [b m k], index [b ...] -> [b ... k]; zeros where it is -1."""
  take = lambda x, i: x.at[i].get(
    mode="fill", fill_value=0, wrap_negative_indices=False
  )
  return jax.vmap(take)(x, index)


def _states(states, plan):
  take = lambda x, i: x.at[i].get(mode="clip")
  return jax.vmap(take)(states, plan.memory)


def _sum_of_pairs(x, weights, plan):
  """x [b m v] of places -> sums over the pairs of each token."""
  # A gather for each, to be fused with the sum.
  parts = [
    weights[..., r, None] * _rows(x, plan.place[..., r])
    for r in range(weights.shape[2])
  ]
  return sum(parts[1:], start=parts[0])


def _products(x, y, dtype):
  return numerics.matmul("bpck,bpkv->bpcv", x, y, dtype=dtype)
