"""The training loss of a language model."""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.ops import _checks


def next_token_loss(
  logits: Float[Array, "b t vocab"],
  targets: Int[Array, "b t"],
  mask: Bool[Array, "b t"] | None = None,
  *,
  z_loss: float = 0.0,
) -> Float[Array, ""]:
  r"""Mean cross-entropy in nats, over the tokens that count.

  .. math::
    \mathrm{mean}_{b,t}\; \log Z - x_{target} + \lambda (\log Z)^2,
    \quad \log Z = \log \sum_l e^{x_l}

  The second term, of PaLM (arXiv 2204.02311), keeps log Z near 0.

  Args:
    logits: of the model, at the tokens before the targets.
    targets: ids of the tokens to predict: the input moved one to the left.
      One out of range makes the loss nan, unless it is masked.
    mask: False for targets that do not count.
    z_loss: the factor lambda.

  Returns:
    The mean, float32; 0 when nothing counts.

  Raises:
    ValueError: when shapes or dtypes do not fit.

  Example:
    >>> import jax.numpy as jnp
    >>> from memcache_jax.models import next_token_loss
    >>> loss = next_token_loss(jnp.zeros((1, 3, 8)), jnp.array([[1, 2, 3]]))
    >>> round(float(loss), 4)  # log(8)
    2.0794
  """
  _checks.check_shapes(
    {
      "logits": (logits, "b t vocab"),
      "targets": (targets, "b t"),
      "mask": (mask, "b t"),
    }
  )
  _checks.check_given(logits=logits, targets=targets)
  _checks.check_floating(logits=logits)
  _checks.check_integers(targets=targets)
  _checks.check_bool(mask=mask)
  if mask is None:
    mask = jnp.ones(targets.shape, bool)
  # Masked logits may be nan: they must not reach a gradient.
  logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0)
  targets = jnp.where(mask, targets, 0)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  vocab_size = logits.shape[-1]
  wrong = (targets < 0) | (targets >= vocab_size)
  # Not a gather: a vocabulary that is spread over devices stays where it is.
  chosen = jnp.arange(vocab_size)[None, None] == targets[..., None]
  picked = jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
  picked = jnp.where(wrong, jnp.nan, picked)
  loss = log_z - picked + z_loss * log_z**2
  loss = jnp.where(mask, loss, 0)
  return jnp.sum(loss) / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
