"""The two functions that decoding is made of; pure, for use inside jit."""

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Bool, Float, Int, State
from memcache_jax.models import LanguageModel
from memcache_jax.ops import _checks


def prefill(
  model: LanguageModel,
  tokens: Int[Array, "b t"],
  state: tuple[State, ...],
  *,
  mask: Bool[Array, "b t"] | None = None,
  segment_ends: Bool[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b vocab"], tuple[State, ...]]:
  """Reads a stretch of a prompt, of any length and from any position.

  Args:
    model: the model.
    tokens: ids.
    state: what `model.init_state` or an earlier call returned.
    mask: False for padding, on either side.
    segment_ends: True at the last token of a segment; see `LanguageModel`.

  Returns:
    Logits of the token after the last real one of each row (nan for a row
    without any), and the state.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.decoding import decode_step, prefill
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> state = model.init_state(batch=1, max_length=32)
    >>> logits, state = jax.jit(prefill)(model, jnp.array([[1, 2, 3]]), state)
    >>> step = jax.jit(decode_step, donate_argnames="state")
    >>> logits, state = step(model, jnp.argmax(logits, -1), state)
    >>> logits.shape
    (1, 256)
  """
  if state is None:
    raise ValueError(
      "`state` must be what `model.init_state` or an earlier call returned: "
      "got None."
    )
  x, state = model.features(tokens, state, mask=mask, segment_ends=segment_ends)
  b, t = tokens.shape
  if t == 0:
    logits = jnp.full((b, model.config.vocab_size), jnp.nan, jnp.float32)
    return logits, state
  if mask is None:
    return model.logits(x[:, -1:])[:, 0], state
  index = jnp.arange(t, dtype=jnp.int32)[None]
  last = jnp.max(jnp.where(mask, index, -1), axis=1)
  x = jnp.take_along_axis(x, jnp.maximum(last, 0)[:, None, None], axis=1)
  logits = model.logits(x)[:, 0]
  return jnp.where((last >= 0)[:, None], logits, jnp.nan), state


def decode_step(
  model: LanguageModel,
  tokens: Int[Array, " b"],
  state: tuple[State, ...],
  *,
  mask: Bool[Array, " b"] | None = None,
  segment_ends: Bool[Array, " b"] | None = None,
) -> tuple[Float[Array, "b vocab"], tuple[State, ...]]:
  """Reads one token per row.

  Donate the state when calling it through `jax.jit`: caches are then updated
  in place.

  Args:
    model: the model.
    tokens: ids.
    state: what `prefill` or an earlier step returned.
    mask: False for rows that have no token in this step.
    segment_ends: True for rows in which a segment ends with this token.

  Returns:
    Logits of the token after it, and the state.
  """
  _checks.check_shapes(
    {
      "tokens": (tokens, "b"),
      "mask": (mask, "b"),
      "segment_ends": (segment_ends, "b"),
    }
  )
  tokens, mask, segment_ends = jax.tree.map(
    lambda x: x[:, None], (tokens, mask, segment_ends)
  )
  return prefill(model, tokens, state, mask=mask, segment_ends=segment_ends)
