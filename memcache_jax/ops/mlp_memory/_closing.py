"""What happens to a memory when an inner batch is complete.

Inside an inner batch everything is a gradient step, linear in the gradients.
What is not linear (normalisation, the entropic mirror, orthogonalisation) is
done once, at its end: the scheme of Miras (arXiv 2504.13173) and of LaCT
(arXiv 2505.23884), which keeps the chunk-parallel form exact.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Params
from memcache_jax.ops.mlp_memory._architecture import is_bias


@dataclass(frozen=True)
class Closing:
  """Nothing happens: gradient descent with decay and momentum.

  Attributes:
    reads_own_batch: tokens read the writes of their own inner batch.
    tracks_decay: `close` needs the product of the decays of the batch.
  """

  reads_own_batch: ClassVar[bool] = True
  tracks_decay: ClassVar[bool] = False

  def scale(self, start: Params) -> dict[str, Float[Array, "b n"]] | None:
    """Factors, frozen over the batch, from stored parameters to weights."""
    del start
    return None

  def as_read(self, start: Params, theta: Params) -> Params:
    """Stored parameters as weights, scaled as at the start of the batch."""
    scale = self.scale(start)
    if scale is None:
      return theta
    return {
      name: scale[name].reshape(scale[name].shape + (1,) * (x.ndim - 2)) * x
      for name, x in theta.items()
    }

  def close(
    self,
    start: Params,
    theta: Params,
    momentum: Params | None,
    decay: Float[Array, "b n"] | None,
  ) -> tuple[Params, Params | None]:
    """Parameters and momentum after the batch, leaves [b n ...]."""
    del start, decay
    return theta, momentum


@dataclass(frozen=True)
class NormClosing(Closing):
  r"""``W = A / |A|_q^{q-2}``, the norm that of the batch's start: Moneta.

  Miras (arXiv 2504.13173), l_q retention; one norm per head and weight. What
  is stored is A; gradients are taken and reads made at W. Biases, which start
  at zero and so have no norm to divide by, are read as they are.
  """

  q: float = 4.0

  def scale(self, start):
    return {
      name: jnp.ones(x.shape[:2], x.dtype) if is_bias(name) else self._scale(x)
      for name, x in start.items()
    }

  def _scale(self, x):
    # Scaled by the largest entry, which keeps powers in range. The guard is
    # far below any trained norm, and keeps an all-zero parameter finite.
    axes = tuple(range(2, x.ndim))
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    largest = jax.lax.stop_gradient(jnp.maximum(largest, 1e-6))
    total = jnp.sum(jnp.abs(x / largest) ** self.q, axis=axes)
    norm = largest.reshape(total.shape) * jnp.maximum(total, 1e-12) ** (
      1 / self.q
    )
    return norm ** (2.0 - self.q)


@dataclass(frozen=True)
class EntropyClosing(Closing):
  r"""``W <- c softmax(a log W_0 - sum eta G)`` over each parameter: Memora.

  Miras (arXiv 2504.13173), KL and entropy retention. Inside the batch the
  same gradients are subtracted from the weights themselves. ``c`` is the
  number of entries over sqrt(fan in), so that the mean weight is
  1/sqrt(fan in). Biases take plain steps.
  """

  tracks_decay: ClassVar[bool] = True

  def close(self, start, theta, momentum, decay):
    assert decay is not None  # tracks_decay

    # theta = a W_0 - U and the logarithm wanted is a log W_0 - U.
    def mirror(start, theta):
      kept = decay[..., None, None]
      return self.normalize(theta + kept * (_safe_log(start) - start))

    theta = {
      name: x if is_bias(name) else mirror(start[name], x)
      for name, x in theta.items()
    }
    return theta, momentum

  def positive(self, params: Params) -> Params:
    """Initial parameters [n ...] with positive weights, from their logs."""
    return {
      name: self.normalize(x) if name.startswith("w") else x
      for name, x in params.items()
    }

  def normalize(
    self, log_weight: Float[Array, "*b n i o"]
  ) -> Float[Array, "*b n i o"]:
    """``c softmax`` over the last two axes."""
    fan_in, out = log_weight.shape[-2:]
    return fan_in**0.5 * out * jax.nn.softmax(log_weight, axis=(-2, -1))


@dataclass(frozen=True)
class MuonClosing(Closing):
  r"""``W <- a W + step NS(S)``, once per batch, S the momentum at its end.

  The chunk-wise variant of Atlas (arXiv 2505.23735) and, with `renormalize`,
  LaCT's update (arXiv 2505.23884). Newton-Schulz is not linear, so that
  tokens read the (decayed) weights from before their batch.

  Attributes:
    step: size of the orthogonal update, which has singular values near 1.
    iterations: Newton-Schulz steps.
    renormalize: every column of W (the weights of one output) keeps its norm.
    reset: the momentum starts at 0 in every batch (LaCT without momentum).
  """

  step: float = 0.1
  iterations: int = 5
  renormalize: bool = False
  reset: bool = False

  reads_own_batch: ClassVar[bool] = False

  def close(self, start, theta, momentum, decay):
    del start, decay
    assert momentum is not None  # checked by the op

    def matrix_update(theta, momentum):
      new = theta + self.step * orthogonalize(momentum, self.iterations)
      if self.renormalize:
        new = new * (_column_norm(theta) / _column_norm(new))
      return new

    theta = {
      name: x + self.step * momentum[name]
      if is_bias(name)
      else matrix_update(x, momentum[name])
      for name, x in theta.items()
    }
    if self.reset:
      momentum = jax.tree.map(jnp.zeros_like, momentum)
    return theta, momentum


def orthogonalize(
  x: Float[Array, "*axes i o"], iterations: int = 5
) -> Float[Array, "*axes i o"]:
  """Newton-Schulz: singular values of x, whatever they are, to about 1.

  Muon's quintic (coefficients 3.4445, -4.7750, 2.0315), float32.
  """
  a, b, c = 3.4445, -4.7750, 2.0315
  square = jnp.sum(x * x, axis=(-2, -1), keepdims=True)
  x = x * jax.lax.rsqrt(square + 1e-12)
  flip = x.shape[-2] > x.shape[-1]
  x = jnp.swapaxes(x, -2, -1) if flip else x
  for _ in range(iterations):
    gram = jnp.einsum("...io,...jo->...ij", x, x)
    mixed = b * gram + c * jnp.einsum("...ij,...jk->...ik", gram, gram)
    x = a * x + jnp.einsum("...ij,...jo->...io", mixed, x)
  return jnp.swapaxes(x, -2, -1) if flip else x


def _column_norm(x):
  return jnp.sqrt(jnp.sum(x * x, axis=-2, keepdims=True) + 1e-12)


def _safe_log(x):
  return jnp.log(jnp.maximum(x, 1e-30))
