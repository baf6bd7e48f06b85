"""The definition of the delta rule: one token at a time, in float32."""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float


def delta_rule(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  beta: Float[Array, "b t n"],
  log_decay: Float[Array, "b t n"] | None,
  state: Float[Array, "b n k v"],
  initial: Float[Array, "n k v"] | None,
  starts: Bool[Array, "b t"] | None,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b n k v"]]:
  """`delta_rule` as a scan over tokens; masked ones come in as zeros."""
  if log_decay is None:
    log_decay = jnp.zeros(beta.shape, jnp.float32)
  if starts is None:
    starts = jnp.zeros(beta.shape[:2], bool)
  fresh = jnp.zeros((), jnp.float32)
  if initial is not None:
    fresh = initial.astype(jnp.float32)
  fresh = jnp.broadcast_to(fresh, state.shape)

  def step(state, inputs):
    q, k, v, beta, decay, start = inputs
    state = jnp.where(start[:, None, None, None], fresh, state)
    state = decay[..., None, None] * state
    error = v - _einsum("bnk,bnkv->bnv", k, state)
    state += _einsum("bnk,bnv->bnkv", beta[..., None] * k, error)
    return state, _einsum("bnk,bnkv->bnv", q, state)

  decay = jnp.exp(log_decay.astype(jnp.float32))
  inputs = [x.astype(jnp.float32) for x in (q, k, v, beta, decay)]
  inputs = [jnp.moveaxis(x, 1, 0) for x in (*inputs, starts)]
  state, y = jax.lax.scan(step, state, inputs)
  return jnp.moveaxis(y, 0, 1).astype(v.dtype), state


def _einsum(subscripts, *operands):
  return jnp.einsum(subscripts, *operands, precision="highest")
