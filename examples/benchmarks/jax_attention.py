"""Attention as `jax.nn` has it, in the projections and caches of our layer."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memcache_jax.layers import (
  Attention,
  AttentionState,
  _attention_state,
  _rope,
)
from memcache_jax.layers._softmax_attention import Keys
from memcache_jax.models import AttentionSpec

# Most queries computed at a time: `jax.nn.dot_product_attention` makes the
# weights of all pairs, which at 32K tokens are more than there is memory for.
CHUNK = 512


class JaxAttention(Attention):
  """`jax.nn.dot_product_attention` over all earlier tokens of one document."""

  def _attend(self, q, k, v, state, front, persistent):
    assert not persistent
    assert front.starts is None
    assert front.valid is None
    b, t = q.shape[:2]
    length = jnp.zeros((b,), jnp.int32) if state is None else state.length
    position = length[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    q = _rope.rotate(q, position, self.rope_theta)
    k = _rope.rotate(k, position, self.rope_theta)
    own = Keys(k, v, position, jnp.zeros((b, t), jnp.int32))
    written = _attention_state.write(own, state, self.window, has_starts=False)
    keys, values = (k, v) if state is None else (written.keys, written.values)

    def attend(q, position):
      place = jnp.arange(keys.shape[1], dtype=jnp.int32)
      visible = place[None, None] <= position[:, :, None]
      return jax.nn.dot_product_attention(
        q, keys, values, mask=visible[:, None]
      )

    size = math.gcd(t, CHUNK)
    if size == t:
      return attend(q, position), written

    @jax.checkpoint
    def chunk(carry, inputs):
      return carry, attend(*inputs)

    chunks = lambda x: jnp.moveaxis(
      x.reshape(b, t // size, size, *x.shape[2:]), 1, 0
    )
    _, y = jax.lax.scan(chunk, None, (chunks(q), chunks(position)))
    return jnp.moveaxis(y, 0, 1).reshape(v.shape), written


@dataclass(frozen=True)
class JaxAttentionSpec(AttentionSpec):
  """A `JaxAttention` layer at a place of the layer pattern."""

  layer = JaxAttention


def filled(state: AttentionState, tokens: int) -> AttentionState:
  """A state that has read so many tokens; which ones changes no time."""
  key = jax.random.key(0)
  return AttentionState(
    jax.random.normal(key, state.keys.shape),
    jax.random.normal(key, state.values.shape),
    jnp.full_like(state.length, tokens),
  )
