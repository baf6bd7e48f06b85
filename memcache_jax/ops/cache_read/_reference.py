"""The definition of the gated read: one stored memory at a time."""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float


def cache_read(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  weights: Float[Array, "b t n s"],
) -> Float[Array, "b t n v"]:
  """`cache_read` as a scan over stored memories, in float32."""
  q = q.astype(jnp.float32)
  zero = jnp.zeros((*q.shape[:3], states.shape[-1]), jnp.float32)

  def step(y, inputs):
    state, weight = inputs
    read = jnp.einsum("btnk,bnkv->btnv", q, state, precision="highest")
    return y + weight[..., None] * read, None

  inputs = (jnp.moveaxis(states, 1, 0), jnp.moveaxis(weights, 3, 0))
  inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
  return jax.lax.scan(step, zero, inputs)[0]
