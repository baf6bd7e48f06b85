"""Arithmetic that must be done one way everywhere: float32, and never NaN."""

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Bool, DType, Float

# exp(x) is exactly 0 in float32 (denormals included) below this exponent, so
# treating a stronger decay as a full reset changes no number.
_EXP_UNDERFLOW = -104.0


def l2_normalize(
  x: Float[Array, "*axes k"], eps: float = 1e-6
) -> Float[Array, "*axes k"]:
  """``x / sqrt(sum(x^2) + eps)`` over the last axis, in float32.

  The epsilon sits under the root so that an all-zero vector (padding) has a
  finite gradient.
  """
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1) + eps)
  return scale_rows(x32, scale).astype(x.dtype)


def rms_norm(
  x: Float[Array, "*axes k"],
  scale: Float[Array, "..."] | None = None,
  eps: float = 1e-6,
) -> Float[Array, "*axes k"]:
  """``x / rms(x) * scale`` over the last axis, in float32."""
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
  y = x32 * jax.lax.rsqrt(mean_square + eps)
  if scale is not None:
    y = scale_axes(y, scale.astype(jnp.float32))
  return y.astype(x.dtype)


def scale_axes(
  x: Float[Array, "*axes"], scale: Float[Array, "..."]
) -> Float[Array, "*axes"]:
  """Multiplies the trailing axes of `x` by `scale`.

  As an einsum, whose gradient for the scale is a matmul: on a CPU that takes a
  fraction of the time of multiplying and summing.
  """
  rows = "abcdefgh"[: x.ndim - scale.ndim]
  spec = sharding.spec_of(x)
  if any(spec[len(rows) :]):
    scale = jax.reshard(scale, jax.P(*spec[len(rows) :]))
  return jnp.einsum(f"{rows}...,...->{rows}...", x, scale, precision="highest")


def scale_rows(
  x: Float[Array, "*axes k"], scale: Float[Array, "*axes"]
) -> Float[Array, "*axes k"]:
  """Multiplies the last axis of `x` by one number for each row.

  They are spread by an einsum, so that the sum over each row in their gradient
  is a product with a vector: on a CPU that takes a fraction of the time of a
  sum of products.
  """
  ones = jnp.ones(x.shape[-1:], scale.dtype)
  return x * jnp.einsum("...,k->...k", scale, ones, precision="highest")


def dot_rows(
  x: Float[Array, "*axes k"], y: Float[Array, "*axes k"]
) -> Float[Array, "*axes"]:
  """Products of the rows of two arrays.

  Summed by a product with ones, which takes a fraction of the time of a sum on
  a CPU.
  """
  ones = jnp.ones(x.shape[-1:], x.dtype)
  return jnp.einsum("...k,k->...", x * y, ones, precision="highest")


def decay_runs(
  log_decay: Float[Array, "*rows c"], resets: Bool[Array, "*#rows c"]
) -> tuple[Float[Array, "*rows c"], Float[Array, "*rows c"]]:
  """Splits decays into a finite running log sum and a count of resets.

  A decay of zero (``log_decay = -inf``), one too strong for float32 and a
  document start all forget everything; as exponents they would poison sums
  of logs, so they are counted instead. The product of the decays of tokens
  ``i+1..r`` is ``exp(logs[r] - logs[i])`` where ``counts`` agree, else zero.

  Args:
    log_decay: logarithms of the decays, ``<= 0``, float32.
    resets: tokens before which everything is forgotten.

  Returns:
    ``logs``, float32: the sum over the last axis since the last reset, and
    ``counts``, float32: how many resets there were; both inclusive.
  """
  dead = resets | (log_decay < _EXP_UNDERFLOW)
  counts = jnp.cumsum(dead.astype(jnp.float32), axis=-1)
  # A matmul instead of a running sum: it starts anew at every reset, so that
  # not even a rounding error of the gradient crosses one.
  c = log_decay.shape[-1]
  causal = jnp.tril(jnp.ones((1,) * (counts.ndim - 1) + (c, c), bool))
  same = causal & (counts[..., :, None] == counts[..., None, :])
  logs = jnp.einsum(
    "...ce,...e->...c",
    same.astype(jnp.float32),
    jnp.where(dead, 0.0, log_decay),
    precision="highest",
  )
  return logs, counts


def running_log_decay(
  log_decay: Float[Array, "*rows c"],
) -> tuple[Float[Array, "*rows c"], Float[Array, "*rows c"]]:
  """`decay_runs` as running sums, of which no matrix is built.

  Sums go on over resets, so that a strong decay before one costs precision
  after it; the product of decays is the same function of both results.
  """
  dead = log_decay < _EXP_UNDERFLOW
  counts = jnp.cumsum(dead.astype(jnp.float32), axis=-1)
  return jnp.cumsum(jnp.where(dead, 0.0, log_decay), axis=-1), counts


def masked_exp(
  exponent: Float[Array, "*axes"], keep: Bool[Array, "*axes"]
) -> Float[Array, "*axes"]:
  """``exp(exponent)`` where ``keep``, else 0, with a gradient that is finite.

  The exponent is masked before ``exp``: masking after it would multiply an
  infinite derivative by zero.
  """
  return jnp.where(keep, jnp.exp(jnp.where(keep, exponent, 0.0)), 0.0)


def matmul(
  subscripts: str,
  *operands: Float[Array, "..."],
  dtype: DType,
  spec: jax.P | None = None,
) -> Float[Array, "..."]:
  """``einsum`` with operands in ``dtype`` and a float32 result.

  `spec` says how the result is spread over a mesh with Explicit axes.
  """
  operands = tuple(x.astype(dtype) for x in operands)
  return jnp.einsum(
    subscripts,
    *operands,
    preferred_element_type=jnp.float32,
    out_sharding=spec,
  )


def matmul_tokens(
  subscripts: str,
  x: Float[Array, "b t ..."],
  kernel: Float[Array, "..."],
  *,
  dtype: DType,
) -> Float[Array, "b t ..."]:
  """`matmul` of every token with one kernel; subscripts without b and t.

  Rows and tokens are one axis meanwhile: on a CPU the product and what is fused
  with it then take a little over half of the time, gradients included. Under a
  mesh with Explicit axes tokens stay where they are, and weights come to them.
  """
  b, t = x.shape[:2]
  tokens, kernel_axes = subscripts.split(",")
  kernel_axes, kept = kernel_axes.split("->")
  kernel = sharding.beside(kernel.astype(dtype), x)
  rows, spec = sharding.spec_of(x)[:2], sharding.spec_of(kernel)
  if any(rows) or any(spec):
    kept_spec = (spec[kernel_axes.index(axis)] for axis in kept)
    return matmul(
      f"yz{tokens},{kernel_axes}->yz{kept}",
      x,
      kernel,
      dtype=dtype,
      spec=jax.P(*rows, *kept_spec),
    )
  y = matmul(
    f"z{tokens},{kernel_axes}->z{kept}",
    x.reshape(b * t, *x.shape[2:]),
    kernel,
    dtype=dtype,
  )
  return y.reshape(b, t, *y.shape[1:])
