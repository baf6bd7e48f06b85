"""The definition of cached linear attention: one token at a time, float32."""

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops.cached_linear_attention._inputs import (
  Cut,
  Inputs,
  fresh_segments,
  readable,
  split,
)


def cached_linear_attention(
  inputs: Inputs, fresh: Bool[Array, "b g"] | None, cut: Cut
) -> tuple[Float[Array, "b t n v"], Float[Array, "b g n k v"]]:
  """`cached_linear_attention` as a scan over segments, over tokens."""
  b, t, n, k = inputs.q.shape
  shape = (b, n, k, inputs.v.shape[-1])
  weights = readable(inputs.weights, cut)
  log_decay, write = inputs.log_decay, inputs.write
  log_decay = jnp.zeros((b, t, n)) if log_decay is None else log_decay
  write = jnp.ones((b, t, n)) if write is None else write
  tokens = (inputs.q, inputs.k, inputs.v, weights, inputs.own_weight)
  tokens = (*tokens, log_decay, write)
  tokens = [
    rearrange(split(x.astype(jnp.float32), cut), "b g c ... -> g c b ...")
    for x in tokens
  ]
  stored = jnp.zeros((b, cut.segments, *shape[1:]))
  if inputs.memories is not None:
    stored = jnp.concatenate([inputs.memories, stored], axis=1)
  state = jnp.zeros(shape) if inputs.state is None else inputs.state

  def segment(carry, inputs):
    state, stored = carry
    fresh, slot, tokens = inputs
    state = jnp.where(fresh[:, None, None, None], 0.0, state)

    def token(state, inputs):
      q, k, v, weights, own, log_decay, write = inputs
      written = jnp.einsum("bn,bnk,bnv->bnkv", write, k, v, precision="highest")
      state = jnp.exp(log_decay)[..., None, None] * state + written
      y = own[..., None] * jnp.einsum(
        "bnk,bnkv->bnv", q, state, precision="highest"
      )
      y += jnp.einsum(
        "bns,bnk,bsnkv->bnv", weights, q, stored, precision="highest"
      )
      return state, y

    state, y = jax.lax.scan(token, state, tuple(tokens))
    return (state, stored.at[:, slot].set(state)), (y, state)

  fresh = fresh_segments(fresh, cut, b).T
  slots = cut.carried + jnp.arange(cut.segments)
  _, (y, ends) = jax.lax.scan(segment, (state, stored), (fresh, slots, tokens))
  y = rearrange(y, "g c b n v -> b (g c) n v")[:, :t]
  return y.astype(inputs.v.dtype), jnp.moveaxis(ends, 0, 1)
