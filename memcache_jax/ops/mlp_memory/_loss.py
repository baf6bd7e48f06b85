"""Inner losses: what a memory minimises at each token.

Only the gradient with respect to the memory's output enters the equations;
the value is there to be watched.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float


@dataclass(frozen=True)
class InnerLoss:
  """A loss of the memory's output and the token's value (float32)."""

  def gates(self) -> Mapping[str, float]:
    """Numbers it wants for every token and head: name, and largest value."""
    return {}

  def value(
    self,
    output: Float[Array, "*axes v"],
    target: Float[Array, "*axes v"],
    gates: Mapping[str, Float[Array, "*axes"]],
  ) -> Float[Array, "*axes"]:
    """The loss of each token."""
    raise NotImplementedError

  def gradient(
    self,
    output: Float[Array, "*axes v"],
    target: Float[Array, "*axes v"],
    gates: Mapping[str, Float[Array, "*axes"]],
  ) -> Float[Array, "*axes v"]:
    """Its derivative with respect to the output."""
    raise NotImplementedError


@dataclass(frozen=True)
class Dot(InnerLoss):
  """``-<M(k), v>``: Hebbian, the loss of linear attention and DLA."""

  def value(self, output, target, gates):
    del gates
    return -jnp.sum(output * target, axis=-1)

  def gradient(self, output, target, gates):
    del output, gates
    return -target


@dataclass(frozen=True)
class L2(InnerLoss):
  """``1/2 |M(k) - v|^2``: the delta rule's, TTT's and Titans'.

  Titans prints the square without the 1/2; its step size is then half ours.
  """

  def value(self, output, target, gates):
    del gates
    return 0.5 * jnp.sum((output - target) ** 2, axis=-1)

  def gradient(self, output, target, gates):
    del gates
    return output - target


@dataclass(frozen=True)
class Huber(InnerLoss):
  """L2 for small errors, ``delta |e|_1`` for large ones: Yaad's.

  Miras (arXiv 2504.13173): with ``e = M(k) - v``, the branch is taken by
  ``|e|_2 <= delta``, and no gradient goes through the test. ``delta`` is the
  gate "threshold".

  Attributes:
    max_threshold: largest threshold that a layer makes.
  """

  max_threshold: float = 8.0

  def gates(self):
    return {"threshold": self.max_threshold}

  def value(self, output, target, gates):
    error = output - target
    small = self._small(error, gates)[..., 0]
    l2 = 0.5 * jnp.sum(error * error, axis=-1)
    l1 = gates["threshold"] * jnp.sum(jnp.abs(error), axis=-1)
    return jnp.where(small, l2, l1)

  def gradient(self, output, target, gates):
    error = output - target
    large = gates["threshold"][..., None] * jnp.sign(error)
    return jnp.where(self._small(error, gates), error, large)

  def _small(self, error, gates):
    error = jax.lax.stop_gradient(error)
    threshold = jax.lax.stop_gradient(gates["threshold"])[..., None]
    square = jnp.sum(error * error, axis=-1, keepdims=True)
    return (square <= threshold * threshold) & (threshold >= 0)


@dataclass(frozen=True)
class Lp(InnerLoss):
  """``|M(k) - v|_p^p``: Moneta's, with Miras' smooth sign and modulus.

  Miras (arXiv 2504.13173): the derivative is
  ``p tanh(sign_slope e) (e^2 + abs_eps)^((p-1)/2)``.

  Attributes:
    p: the power.
    sign_slope: how steep the smooth sign is.
    abs_eps: under the root of the smooth modulus.
  """

  p: float = 3.0
  sign_slope: float = 10.0
  abs_eps: float = 1e-6

  def value(self, output, target, gates):
    del gates
    error = output - target
    return jnp.sum((error * error + self.abs_eps) ** (self.p / 2), axis=-1)

  def gradient(self, output, target, gates):
    del gates
    error = output - target
    modulus = (error * error + self.abs_eps) ** ((self.p - 1) / 2)
    return self.p * jnp.tanh(self.sign_slope * error) * modulus
