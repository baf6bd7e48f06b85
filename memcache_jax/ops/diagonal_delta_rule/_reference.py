"""The definition of the diagonal delta rule: token by token, in float32."""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float


def diagonal_delta_rule(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  log_decay: Float[Array, "b t n k"],
  removal_key: Float[Array, "b t n k"],
  rate: Float[Array, "b t n k"],
  state: Float[Array, "b n k v"],
  initial: Float[Array, "n k v"] | None,
  starts: Bool[Array, "b t"] | None,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b n k v"]]:
  """`diagonal_delta_rule` as a scan; masked tokens come in as zeros."""
  if starts is None:
    starts = jnp.zeros(q.shape[:2], bool)
  fresh = jnp.zeros((), jnp.float32)
  if initial is not None:
    fresh = initial.astype(jnp.float32)
  fresh = jnp.broadcast_to(fresh, state.shape)

  def step(state, inputs):
    q, k, v, decay, removal_key, rate, start = inputs
    state = jnp.where(start[:, None, None, None], fresh, state)
    removed = _einsum("bnk,bnkv->bnv", removal_key, state)
    state = (
      decay[..., None] * state
      - _einsum("bnk,bnv->bnkv", rate * removal_key, removed)
      + _einsum("bnk,bnv->bnkv", k, v)
    )
    return state, _einsum("bnk,bnkv->bnv", q, state)

  decay = jnp.exp(log_decay.astype(jnp.float32))
  inputs = (q, k, v, decay, removal_key, rate)
  inputs = [x.astype(jnp.float32) for x in inputs]
  inputs = [jnp.moveaxis(x, 1, 0) for x in (*inputs, starts)]
  state, y = jax.lax.scan(step, state, inputs)
  return jnp.moveaxis(y, 0, 1).astype(v.dtype), state


def _einsum(subscripts, *operands):
  return jnp.einsum(subscripts, *operands, precision="highest")
