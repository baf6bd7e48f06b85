"""Rotary position embedding."""

import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Int


def rotate(
  x: Float[Array, "b t n k"], position: Int[Array, "b t"], theta: float
) -> Float[Array, "b t n k"]:
  """Rotates pairs (i, i + k/2) by ``position * theta^(-2i/k)``.

  RoPE (arXiv 2104.09864) with Llama's pairs. Angles and products are float32;
  the result has the dtype of x.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = position[..., None].astype(jnp.float32) * frequency[None, None]
  cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)
