"""A decode step as a file that runs where this library is not installed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import export

from memcache_jax.decoding._steps import decode_step
from memcache_jax.models import LanguageModel
from memcache_jax.ops import _checks


def export_step(
  model: LanguageModel,
  max_length: int,
  *,
  platforms: Sequence[str] | None = None,
) -> export.Exported:
  """`decode_step` of a model, compiled to StableHLO for any number of rows.

  Weights are arguments, not part of it: ``logits, state = call(weights, tokens,
  state)``, where weights and state are the lists of leaves that `jax.tree`
  makes of a model and of its state. Its `serialize()` needs the package
  flatbuffers (extra `export`), and what `jax.export.deserialize` makes of that
  needs nothing but jax. The first token of a text is read like any other, so
  that a state to begin with is all that has to be kept beside the weights.

  Args:
    model: the model; its weights may be those of `jax.eval_shape`.
    max_length: tokens of one document that states have room for; see
      `LanguageModel.init_state`.
    platforms: to run on, such as ``("cpu", "tpu")``; the current one if None.

  Returns:
    What `jax.export.export` does. Call it through ``jax.jit(step.call,
    donate_argnums=2)``: caches are then updated in place.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.decoding import export_step
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> data = export_step(model, max_length=64).serialize()
    >>> step = jax.export.deserialize(data)  # in another process
    >>> weights = jax.tree.leaves(model)
    >>> state = jax.tree.leaves(model.init_state(batch=2, max_length=64))
    >>> logits, state = step.call(weights, jnp.array([1, 2], jnp.int32), state)
    >>> logits.shape
    (2, 256)
  """
  if not isinstance(model, LanguageModel):
    raise ValueError(f"`model` must be a LanguageModel: got {model!r}.")
  _checks.check_positive(max_length=max_length)
  if isinstance(platforms, str) or platforms == ():
    raise ValueError(
      "`platforms` must be names in a sequence, such as ('cpu', 'tpu'): got "
      f"{platforms!r}."
    )
  (batch,) = export.symbolic_shape("b")
  weights, model_tree = jax.tree.flatten(model)
  one_row = jax.eval_shape(lambda: model.init_state(1, max_length))
  rows, state_tree = jax.tree.flatten(one_row)

  @jax.jit
  def step(weights, tokens, state):
    model = jax.tree.unflatten(model_tree, weights)
    state = jax.tree.unflatten(state_tree, state)
    logits, state = decode_step(model, tokens, state)
    return logits, jax.tree.leaves(state)

  return export.export(step, platforms=platforms)(
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights],
    jax.ShapeDtypeStruct((batch,), jnp.int32),
    [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in rows],
  )
