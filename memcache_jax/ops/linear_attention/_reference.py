"""The definition of linear attention: one token at a time, in float32."""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops.linear_attention._state import LinearAttentionState


def linear_attention(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  log_decay: Float[Array, "b t n"] | None,
  write: Float[Array, "b t n w"] | None,
  state: LinearAttentionState,
  mask: Bool[Array, "b t"] | None,
  starts: Bool[Array, "b t"] | None,
) -> tuple[Float[Array, "b t n v"], LinearAttentionState]:
  """`linear_attention` as a scan over tokens."""
  b, t, n, _ = k.shape
  if log_decay is None:
    log_decay = jnp.zeros((b, t, n), jnp.float32)
  if write is None:
    write = jnp.ones((b, t, n, 1), jnp.float32)
  mask = jnp.ones((b, t), bool) if mask is None else mask
  starts = jnp.zeros((b, t), bool) if starts is None else starts
  carry = state
  if state.keys is None:  # a window of one token: an empty list of old ones
    carry = LinearAttentionState(
      state.matrix,
      jnp.zeros((b, 0, n, k.shape[-1]), jnp.float32),
      jnp.zeros((b, 0, n, v.shape[-1]), jnp.float32),
    )
  inputs = (q, k, v, jnp.exp(log_decay.astype(jnp.float32)), write)
  inputs = [jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in inputs]
  carry, y = jax.lax.scan(_step, carry, (*inputs, mask.T, starts.T))
  if state.keys is None:
    carry = LinearAttentionState(carry.matrix)
  return jnp.moveaxis(y, 0, 1).astype(v.dtype), carry


def _step(state, inputs):
  q, k, v, decay, write, mask, starts = inputs
  state = jax.tree.map(lambda x: jnp.where(_rows(starts, x), 0.0, x), state)
  keys = jnp.concatenate([state.keys, k[:, None]], axis=1)
  values = jnp.concatenate([state.values, v[:, None]], axis=1)
  weights = write[..., ::-1]  # oldest first, like the keys
  written = jnp.einsum(
    "bnw,bwnk,bwnv->bnkv", weights, keys, values, precision="highest"
  )
  matrix = decay[..., None, None] * state.matrix + written
  new = LinearAttentionState(matrix, keys[:, 1:], values[:, 1:])
  state = jax.tree.map(lambda a, b: jnp.where(_rows(mask, a), a, b), new, state)
  y = jnp.einsum("bnk,bnkv->bnv", q, state.matrix, precision="highest")
  return state, jnp.where(_rows(mask, y), y, 0.0)


def _rows(flags: Bool[Array, " b"], like: Array) -> Bool[Array, "b ..."]:
  return flags.reshape((-1,) + (1,) * (like.ndim - 1))
