"""`LanguageModel`: token ids to logits, through blocks that are scanned."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import (
  Array,
  Bool,
  Float,
  Int,
  PyTree,
  Shaped,
  State,
)
from memcache_jax.layers import Block, Projection, RMSNorm
from memcache_jax.layers._base import check_rngs, router_key
from memcache_jax.models._config import ModelConfig
from memcache_jax.models._embedding import Embedding
from memcache_jax.models._specs import MixerSpec
from memcache_jax.models._tokens import check_token_ids
from memcache_jax.ops import _checks


class LanguageModel(nnx.Module):
  """A causal language model with explicit state.

  ``logits = head(norm(blocks(embed(tokens))))``; blocks are pre-norm residual
  (see `layers.Block`), their weights stacked over the repetitions of
  `config.pattern`. The state is a tuple with one entry per layer, in order,
  each a plain pytree with the batch axis first.

  Args:
    config: sizes and layers.
    rngs: where the initial weights come from.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> state = model.init_state(batch=1, max_length=64)
    >>> run = jax.jit(LanguageModel.__call__)
    >>> logits, state = run(model, jnp.array([[1, 2, 3]]), state)
    >>> logits, state = run(model, jnp.array([[4]]), state)
    >>> logits.shape
    (1, 1, 256)
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    if not isinstance(config, ModelConfig):
      raise ValueError(f"`config` must be a ModelConfig: got {config!r}.")
    check_rngs(rngs)
    options: dict[str, Any] = {
      "dtype": config.dtype,
      "param_dtype": config.param_dtype,
    }
    self.config = config
    self.embedding = Embedding(
      config.vocab_size, config.dim, rngs=rngs, **options
    )

    def make(rngs: nnx.Rngs) -> nnx.List:
      return nnx.List(_block(config, spec, rngs) for spec in config.pattern)

    make = nnx.transform_metadata(make, partition=None)
    self.blocks = jax.vmap(make)(rngs.split(config.repeats))
    self.norm = RMSNorm(config.dim)
    self.head = nnx.data(None)
    if not config.tie_embeddings:
      self.head = Projection(
        "dl", (config.dim, config.vocab_size), rngs=rngs, **options
      )

  def init_state(self, batch: int, max_length: int) -> tuple[State, ...]:
    """The state before the first token, one entry per layer.

    Args:
      batch: rows.
      max_length: most tokens of one document that the state must have room
        for; see `layers.Mixer.init_state`.
    """

    def make(group):
      return [block.init_state(batch, max_length) for block in group]

    return _unstack(jax.vmap(make)(self.blocks), self.config.repeats)

  def __call__(
    self,
    tokens: Int[Array, "b t"],
    state: tuple[State, ...] | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t vocab"], tuple[State, ...]]:
    """Logits of the next token after each token.

    Args:
      tokens: ids. Out of range they raise where their values are known, and
        give nan under a jax transformation.
      state: what an earlier call or `init_state` returned. None: a new
        sequence, and the returned state has room for this call only.
      mask: False for a token that does not exist: it changes nothing, and its
        logits are 0.
      starts: True where a document starts, before which everything is
        forgotten.
      max_unaligned_starts: most document starts per row and call that may lie
        off the grid of the memories; see `memories.Tokens`.
      segment_ends: True at the last token of a segment, for the layers whose
        memories have `caching.Explicit` segments.
      rngs: in training, where what is random comes from; see `layers.Mixer`.
        Under `jax.jit` make it inside, as ``nnx.Rngs(router=key)``.

    Returns:
      Logits in float32, and the state after the last token.
    """
    x, state = self.features(
      tokens,
      state,
      mask=mask,
      starts=starts,
      max_unaligned_starts=max_unaligned_starts,
      segment_ends=segment_ends,
      rngs=rngs,
    )
    return self.logits(x), state

  def features(
    self,
    tokens: Int[Array, "b t"],
    state: tuple[State, ...] | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], tuple[State, ...]]:
    """Like calling the model, but stops before the output layer."""
    _checks.check_shapes(
      {
        "tokens": (tokens, "b t"),
        "mask": (mask, "b t"),
        "starts": (starts, "b t"),
        "segment_ends": (segment_ends, "b t"),
      }
    )
    _checks.check_given(tokens=tokens)
    _checks.check_bool(mask=mask, starts=starts, segment_ends=segment_ends)
    self.check_segment_ends(segment_ends)
    check_token_ids(tokens, self.config.vocab_size, mask)
    if state is not None:
      layers = self.config.num_layers
      if not isinstance(state, tuple) or len(state) != layers:
        raise ValueError(
          f"`state` must be a tuple with one entry per layer, {layers}, as "
          f"`init_state` returns: got a {type(state).__name__}"
          + (f" of {len(state)}." if isinstance(state, tuple) else ".")
        )
    x = self.embedding(tokens, mask)
    flags = {
      "mask": mask,
      "starts": starts,
      "max_unaligned_starts": max_unaligned_starts,
      "segment_ends": segment_ends,
    }
    if tokens.shape[1] == 1 and state is not None:
      x, state = self._step(x, state, flags, rngs)
    else:
      x, state = self._scan(x, state, flags, rngs)
    return self.norm(x), state

  def logits(self, x: Float[Array, "b t d"]) -> Float[Array, "b t vocab"]:
    """Turns features into logits, float32."""
    if self.head is None:
      return self.embedding.attend(x)
    return self.head(x, jnp.float32)

  def unstacked_blocks(self) -> list[Block]:
    """The blocks in order, each with its own weights."""
    return [block for group in self._groups() for block in group]

  def hold(self, x):
    """Keeps the residual stream on the devices where it belongs."""
    if self.config.activations is None:
      return x
    return jax.lax.with_sharding_constraint(x, self.config.activations)

  def check_segment_ends(self, segment_ends: Array | None) -> None:
    """Raises ValueError for flags that no layer has a use for."""
    if segment_ends is None or any(b.uses_segment_ends for b in self.blocks):
      return
    raise ValueError(
      "`segment_ends` must be None for a model without explicit segments: got "
      f"flags, and the layers {self.config.pattern}."
    )

  def rematted(self, body: Callable) -> Callable:
    """The body of a scan over repetitions, recomputed as the config says."""
    remat = self.config.remat
    if not remat:
      return body
    policy = None if remat is True else remat
    return jax.checkpoint(body, policy=policy, prevent_cse=False)

  def router_keys(
    self, rngs: nnx.Rngs | None
  ) -> Shaped[Array, "repeats period"] | None:
    """A key for every block, by repetition and place; None without `rngs`."""
    if rngs is None:
      return None
    shape = self.config.repeats, len(self.config.pattern)
    return jax.random.split(router_key(rngs), shape)

  def _groups(self):
    """The repetitions of the pattern, each with its own weights."""
    return [_take(self.blocks, i) for i in range(self.config.repeats)]

  def _step(self, x, state, flags, rngs):
    """One token. Not scanned: a scan would copy every cache to and fro."""
    new_state = []
    keys = self.router_keys(rngs)
    for i, group in enumerate(self._groups()):
      of_group = None if keys is None else keys[i]
      x, states = _apply(group, x, state[len(new_state) :], flags, of_group)
      new_state += states
    return x, tuple(new_state)

  def _scan(self, x, state, flags, rngs):
    period = len(self.config.pattern)

    def body(x, inputs):
      group, states, keys = inputs
      x, states = _apply(group, self.hold(x), states, flags, keys)
      return self.hold(x), states

    stacked = None
    if state is not None:
      # Layers at the same place of the pattern have states of one shape.
      stacked = [_stack(state[i::period]) for i in range(period)]
    inputs = (self.blocks, stacked, self.router_keys(rngs))
    x, stacked = jax.lax.scan(self.rematted(body), x, inputs)
    return x, _unstack(stacked, self.config.repeats)


def _block(config: ModelConfig, spec: MixerSpec, rngs: nnx.Rngs) -> Block:
  options = {
    # Keeps the size of the residual stream independent of depth.
    "out_scale": (2 * config.num_layers) ** -0.5,
    "dtype": config.dtype,
    "param_dtype": config.param_dtype,
    "rngs": rngs,
  }
  mixer = spec.build(config.dim, **options)
  return Block(mixer, config.hidden_dim, **options)


def _apply(group, x, states, flags, keys):
  """Runs the blocks of one repetition; states None, or from its first on."""
  new_states = []
  for i, block in enumerate(group):
    state = None if states is None else states[i]
    ends = flags["segment_ends"] if block.uses_segment_ends else None
    rngs = None if keys is None else nnx.Rngs(router=keys[i])
    x, state = block(x, state, **{**flags, "segment_ends": ends}, rngs=rngs)
    new_states.append(state)
  return x, new_states


def _take(tree: PyTree, index: int) -> PyTree:
  return jax.tree.map(lambda x: x[index], tree)


def _unstack(stacked, repeats) -> tuple[State, ...]:
  """Stacked states of the places of the pattern -> states of the layers."""
  groups = [_take(stacked, i) for i in range(repeats)]
  return tuple(state for group in groups for state in group)


def _stack(trees) -> PyTree:
  return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
