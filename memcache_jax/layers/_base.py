"""`Mixer`: what every layer that mixes tokens has in common."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax import token_layout
from memcache_jax.array_typing import (
  Array,
  Bool,
  DType,
  Float,
  Int,
  State,
  UInt32,
)
from memcache_jax.ops import _checks


class Mixer(nnx.Module):
  """A layer through which tokens see earlier ones; its state is explicit.

  The state is a plain pytree with the batch axis first. It goes in and comes
  out, and is never kept in the module, so that any split of a sequence into
  calls gives the same result.

  Attributes:
    dim: model width.
  """

  dim: int

  @property
  def uses_segment_ends(self) -> bool:
    """Whether `segment_ends` means anything to the layer."""
    return False

  def init_state(self, batch: int, max_length: int) -> State:
    """The state before the first token.

    Args:
      batch: rows.
      max_length: most tokens of one document that the state must have room
        for. Outputs beyond it may be nan.
    """
    raise NotImplementedError

  def __call__(
    self,
    x: Float[Array, "b t d"],
    state: State | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
    max_unaligned_starts: int | None = None,
    segment_ends: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
  ) -> tuple[Float[Array, "b t d"], State]:
    """Mixes a stretch of tokens.

    Args:
      x: inputs, already normalised.
      state: what an earlier call or `init_state` returned. None: a new
        sequence, and the returned state has room for this call only.
      mask: False for a token that does not exist; nothing depends on its x,
        and its y is 0.
      starts: True where a document starts, before which everything is
        forgotten. Ignored on masked tokens.
      max_unaligned_starts: most document starts per row that may lie off the
        grid of the memory, see `memories.Tokens`.
      segment_ends: True at the last token of a segment, for memories with
        `caching.Explicit` segments only. Ignored on masked tokens.
      rngs: in training, where what is random comes from: the stream "router",
        for `caching.GumbelTopK`. None: nothing is.

    Returns:
      y and the state after the last token.
    """
    raise NotImplementedError


def check_inputs(
  x: Array,
  dim: int,
  mask: Array | None,
  starts: Array | None,
  segment_ends: Array | None = None,
) -> None:
  """Raises ValueError unless x is [b t dim] and the flags fit it."""
  _checks.check_shapes(
    {
      "x": (x, "b t d"),
      "mask": (mask, "b t"),
      "starts": (starts, "b t"),
      "segment_ends": (segment_ends, "b t"),
    }
  )
  _checks.check_given(x=x)
  _checks.check_floating(x=x)
  _checks.check_bool(mask=mask, starts=starts, segment_ends=segment_ends)
  if x.shape[2] != dim:
    raise ValueError(
      f"`x` must have axes (b t d) with d={dim}, the width of the layer: "
      f"got shape {x.shape}."
    )


def check_layer(
  dim: int,
  num_heads: int,
  rngs: nnx.Rngs,
  *,
  out_scale: float,
  dtype: DType,
  param_dtype: DType,
  **head_dims: int | None,
) -> None:
  """Raises ValueError unless a layer can be made.

  Heads need a width, given or by division.
  """
  _checks.check_positive(dim=dim, num_heads=num_heads)
  _checks.check_number(low=0, out_scale=out_scale)
  _checks.check_dtype(dtype=dtype, param_dtype=param_dtype)
  check_rngs(rngs)
  for name, value in head_dims.items():
    if value is not None:
      _checks.check_positive(**{name: value})
    elif dim % num_heads:
      raise ValueError(
        f"`dim` must be divisible by `num_heads` when `{name}` is not given: "
        f"got dim={dim}, num_heads={num_heads}."
      )


def check_rngs(rngs: nnx.Rngs) -> None:
  """Raises ValueError unless it is what `nnx.Rngs` makes."""
  if not isinstance(rngs, nnx.Rngs):
    raise ValueError(f"`rngs` must be an nnx.Rngs: got {rngs!r}.")


def draw_seeds(
  rngs: nnx.Rngs | None, x: Float[Array, "b t d"]
) -> UInt32[Array, "b t"] | None:
  """Random bits of every token, `Tokens.seeds`; None without `rngs`."""
  if rngs is None:
    return None
  return jax.random.bits(router_key(rngs), x.shape[:2])


def router_key(rngs: nnx.Rngs) -> Array:
  """The next key of the stream "router", or of the default one."""
  check_rngs(rngs)
  if not hasattr(rngs, "router"):
    raise ValueError(
      f"`rngs` must have a stream 'router' or 'default': got {rngs}."
    )
  return rngs.router()


def check_state_kind(state: State | None, kind: type) -> None:
  """Raises ValueError unless a state, if there is one, is of this kind."""
  if state is not None and not isinstance(state, kind):
    raise ValueError(
      f"`state` must be the {kind.__name__} that `init_state` or an earlier "
      f"call of this layer returned: got a {type(state).__name__}."
    )


class Front(NamedTuple):
  """Real tokens of a call moved to the front of their row.

  Layers then need no mask but a count. Without one nothing moves.
  """

  x: Float[Array, "b t ..."]  # zeros behind the real tokens
  starts: Bool[Array, "b t"] | None
  segment_ends: Bool[Array, "b t"] | None
  plan: token_layout.Compaction | None

  @property
  def valid(self) -> Bool[Array, "b t"] | None:
    """Which places hold a real token; None: all."""
    return None if self.plan is None else self.plan.valid

  @property
  def count(self) -> Int[Array, " b"] | None:
    """Real tokens of each row; None: all."""
    return None if self.plan is None else self.plan.count

  def back(self, y: Float[Array, "b t ..."]) -> Float[Array, "b t ..."]:
    """Moves outputs to where their tokens came from; zeros elsewhere."""
    if self.plan is None:
      return y
    y = token_layout.zero_masked(y, self.plan.valid)
    return token_layout.take_tokens(y, self.plan.target)


def to_front(
  x: Float[Array, "b t ..."],
  mask: Bool[Array, "b t"] | None,
  starts: Bool[Array, "b t"] | None,
  segment_ends: Bool[Array, "b t"] | None = None,
) -> Front:
  """Moves real tokens to the front. What masked ones hold, even nan, is lost.

  Args:
    x: inputs.
    mask: False for tokens that do not exist.
    starts: True where a document starts.
    segment_ends: True where a segment ends.
  """
  if mask is None:
    return Front(x, starts, segment_ends, None)
  plan = token_layout.compact(mask)
  x = token_layout.zero_masked(x, mask)
  flags = jax.tree.map(lambda flag: flag & mask, (starts, segment_ends))
  x, (starts, segment_ends) = token_layout.take_tokens((x, flags), plan.source)
  return Front(x, starts, segment_ends, plan)


def empty_like(x: Float[Array, "b t ..."], length: int) -> Array:
  """Zeros [b length ...] in float32, sharded like x."""
  pad = [(0, 0), (0, length)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x[:, :0].astype(jnp.float32), pad)
