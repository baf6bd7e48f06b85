"""What the memories of a model do with a text, to be plotted or logged."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import Array, Bool, Float, Int
from memcache_jax.caching import SelectionReport
from memcache_jax.caching._report import watches_selection
from memcache_jax.layers import MemoryAsContext, MemoryAsGate, MemoryMixer
from memcache_jax.memories import Watched
from memcache_jax.models._language_model import LanguageModel
from memcache_jax.models._tokens import check_token_ids


class MemoryReport(NamedTuple):
  """What the memory of one layer did with some tokens.

  Attributes:
    inner_loss: mean over tokens and heads of what the memory minimises, at
      the weights at which gradients are taken; None where it is nothing.
    state_norm: the largest norm of the memory of a head, at any token.
  """

  inner_loss: Float[Array, ""] | None
  state_norm: Float[Array, ""]


def segment_gates(
  model: LanguageModel,
  tokens: Int[Array, "b t"],
  *,
  mask: Bool[Array, "b t"] | None = None,
  segment_ends: Bool[Array, "b t"] | None = None,
) -> dict[int, Float[Array, "b t n s_and_online"]]:
  """How much every token reads each memory, for looking at and plotting.

  Args:
    model: the model.
    tokens: ids of new sequences.
    mask: False for tokens that do not exist.
    segment_ends: True at the last token of a segment.

  Returns:
    For every layer with a cached memory, by its number from 0, the weight
    of the cached memories in order and last that of the online one.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> from memcache_jax.models import segment_gates
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> gates = jax.jit(segment_gates)(model, jnp.ones((1, 40), jnp.int32))
    >>> gates[0].shape  # 2 cached segments of 16 tokens, and the online one
    (1, 40, 2, 3)
  """
  model.check_segment_ends(segment_ends)
  check_token_ids(tokens, model.config.vocab_size, mask)
  x, gates = model.embedding(tokens, mask), {}
  for layer, block in enumerate(model.unstacked_blocks()):
    ends = segment_ends if block.uses_segment_ends else None
    memory = getattr(block.mixer, "memory", None)
    if hasattr(memory, "inspect"):
      x, _, gates[layer] = block.inspect(x, mask=mask, segment_ends=ends)
    else:
      x, _ = block(x, mask=mask, segment_ends=ends)
  return gates


def memory_reports(
  model: LanguageModel,
  tokens: Int[Array, "b t"],
  *,
  mask: Bool[Array, "b t"] | None = None,
) -> dict[int, MemoryReport]:
  """How well every memory learns, and how large it grows, to be logged.

  The largest norm names the layer that diverges, or will.

  Args:
    model: the model.
    tokens: ids of new sequences; a few, as they are written one by one.
    mask: False for tokens that do not exist.

  Returns:
    For every layer with a memory, by its number from 0, its report.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> from memcache_jax.models import memory_reports
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> reports = jax.jit(memory_reports)(model, jnp.ones((1, 9), jnp.int32))
    >>> sorted(reports)
    [0, 1]
  """
  check_token_ids(tokens, model.config.vocab_size, mask)
  x, reports = model.embedding(tokens, mask), {}
  for layer, block in enumerate(model.unstacked_blocks()):
    if isinstance(block.mixer, MemoryMixer | MemoryAsGate | MemoryAsContext):
      watched = block.mixer.watch(block.mixer_norm(x), mask=mask)
      reports[layer] = _report(watched, mask)
    x, _ = block(x, mask=mask)
  return reports


def selection_reports(
  model: LanguageModel,
  tokens: Int[Array, "b t"],
  *,
  mask: Bool[Array, "b t"] | None = None,
  starts: Bool[Array, "b t"] | None = None,
  max_unaligned_starts: int | None = None,
  segment_ends: Bool[Array, "b t"] | None = None,
  rngs: nnx.Rngs | None = None,
) -> tuple[Float[Array, "b t vocab"], dict[int, SelectionReport]]:
  """Logits of new sequences, and what their tokens select, in one pass.

  To be logged, or for a loss that spreads selections over the memories: that
  of the logits plus a little of the sum of ``report.balance``.

  Args:
    model: the model.
    tokens: ids of new sequences.
    mask: False for tokens that do not exist.
    starts: True where a document starts.
    max_unaligned_starts: see `LanguageModel`.
    segment_ends: True at the last token of a segment.
    rngs: see `LanguageModel`.

  Returns:
    What calling the model returns of logits; and the report of every layer
    with sparse selective caching, by its number from 0. Layers whose segments
    are merged or dropped have none.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.caching import Cached, Constant, SparseSelective
    >>> from memcache_jax.memories import Linear
    >>> from memcache_jax.models import LanguageModel, MemorySpec, ModelConfig
    >>> from memcache_jax.models import selection_reports
    >>> memory = Cached(Linear(), Constant(8), SparseSelective(2))
    >>> config = ModelConfig.tiny(MemorySpec(memory, num_heads=2))
    >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
    >>> text = jnp.arange(60)[None]
    >>> logits, reports = jax.jit(selection_reports)(model, text)
    >>> bool(reports[0].balance > 0)
    True
  """
  model.check_segment_ends(segment_ends)
  check_token_ids(tokens, model.config.vocab_size, mask)
  flags = {
    "mask": mask,
    "starts": starts,
    "max_unaligned_starts": max_unaligned_starts,
  }

  def body(x, inputs):
    group, keys = inputs
    x = model.hold(x)
    reports = []
    for i, block in enumerate(group):
      ends = segment_ends if block.uses_segment_ends else None
      options = {**flags, "segment_ends": ends}
      # The same draws for both.
      rngs = lambda i=i: None if keys is None else nnx.Rngs(router=keys[i])
      report = None
      if watches_selection(getattr(block.mixer, "memory", None)):
        normed = block.mixer_norm(x)
        report = block.mixer.watch_selection(normed, **options, rngs=rngs())
      reports.append(report)
      x, _ = block(x, **options, rngs=rngs())
    return model.hold(x), reports

  period, repeats = len(model.config.pattern), model.config.repeats
  x = model.embedding(tokens, mask)
  inputs = (model.blocks, model.router_keys(rngs))
  x, stacked = jax.lax.scan(model.rematted(body), x, inputs)
  reports = {
    group * period + place: jax.tree.map(lambda x, i=group: x[i], report)
    for group in range(repeats)
    for place, report in enumerate(stacked)
    if report is not None
  }
  return model.logits(model.norm(x)), reports


def _report(watched: Watched, mask) -> MemoryReport:
  loss = watched.inner_loss
  if loss is not None:
    count = jnp.asarray(loss.size, jnp.float32)
    if mask is not None:
      count = loss.shape[2] * jnp.sum(mask, dtype=jnp.float32)
    loss = jnp.sum(loss) / jnp.maximum(count, 1.0)
  return MemoryReport(loss, jnp.max(watched.norm))
