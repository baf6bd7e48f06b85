"""A short causal convolution that knows documents and masks."""

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax import numerics, sharding, token_layout
from memcache_jax.array_typing import Array, Bool, DType, Float, Int
from memcache_jax.layers._base import empty_like, to_front
from memcache_jax.ops import _checks


class ShortConv(nnx.Module):
  r"""Depthwise causal convolution over the last few tokens.

  .. math:: y_t = \sum_{o=0}^{w-1} K_o \odot x_{t-o}

  It counts real tokens only, and none from before the start of the document.
  The state is the last ``w - 1`` inputs, zeros where the document is younger.

  Args:
    features: sizes of the trailing axes of x, one weight each and offset.
    width: tokens seen, w; the token itself included.
    dtype: of y; products and sums are float32.
    param_dtype: of the stored kernel [w ...].
    rngs: where the initial weights come from.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import ShortConv
    >>> conv = ShortConv((2, 3), rngs=nnx.Rngs(0))
    >>> y, state = conv(jnp.ones((1, 5, 2, 3)))
    >>> y.shape, state.shape
    ((1, 5, 2, 3), (1, 3, 2, 3))
  """

  def __init__(
    self,
    features: tuple[int, ...],
    width: int = 4,
    *,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    _checks.check_positive(width=width)
    self.features = features
    self.width = width
    self.dtype = dtype
    bound = width**-0.5
    kernel = jax.random.uniform(
      rngs.params(), (width, *features), param_dtype, -bound, bound
    )
    self.kernel = nnx.Param(kernel)

  def init_state(self, batch: int) -> Float[Array, "b w_less_1 ..."]:
    """The state before the first token."""
    return jnp.zeros((batch, self.width - 1, *self.features), jnp.float32)

  def __call__(
    self,
    x: Float[Array, "b t ..."],
    state: Float[Array, "b w_less_1 ..."] | None = None,
    *,
    mask: Bool[Array, "b t"] | None = None,
    starts: Bool[Array, "b t"] | None = None,
  ) -> tuple[Float[Array, "b t ..."], Float[Array, "b w_less_1 ..."]]:
    """Convolves a stretch of tokens.

    Args:
      x: inputs; trailing axes as `features` says.
      state: what an earlier call returned; None: nothing before.
      mask: False for tokens that do not exist; their y is 0.
      starts: True where a document starts.

    Returns:
      y, and the last inputs in float32.
    """
    if x.shape[2:] != self.features:
      raise ValueError(
        f"`x` must have trailing axes {self.features}: got shape {x.shape}."
      )
    front = to_front(x, mask, starts)
    y, state = self.convolve(front.x, state, front.starts, front.count)
    return front.back(y), state

  def convolve(
    self,
    x: Float[Array, "b t ..."],
    state: Float[Array, "b w_less_1 ..."] | None,
    starts: Bool[Array, "b t"] | None,
    count: Int[Array, " b"] | None,
  ) -> tuple[Float[Array, "b t ..."], Float[Array, "b w_less_1 ..."]]:
    """Convolves tokens of which the first `count` of a row, or all, exist."""
    kernel = self.kernel[...]
    if sharding.spec_of(x)[1] is not None:
      whole = state is None and count is None
      return self._over_devices(kernel, x, starts, whole)
    expected = (x.shape[0], self.width - 1, *self.features)
    if state is None:
      state = empty_like(x, self.width - 1)
    elif state.shape != expected:
      raise ValueError(
        f"`state` must have shape {expected}: got {state.shape}."
      )
    if x.shape[1] == 0:
      return x.astype(self.dtype), state
    return self._continue(kernel, x, state, starts, count)

  def _over_devices(self, kernel, x, starts, whole):
    """Every device goes on where the one before it ends."""
    axis, tail = sharding.spec_of(x)[1], self.width - 1
    devices = sharding.devices_along(axis)
    if not whole or x.shape[1] < devices * tail:
      raise ValueError(
        "tokens spread over devices must be those of a new sequence without "
        f"mask, at least {tail} on each: got {x.shape[1]} over {devices}."
      )

    def run(x, starts, kernel):
      empty = empty_like(x, tail)
      _, last = self._continue(kernel, x, empty, starts, None)
      after = [(i, i + 1) for i in range(devices - 1)]
      before = jax.lax.ppermute(last, axis, after)
      y, _ = self._continue(kernel, x, before, starts, None)
      return y, jax.lax.all_gather(last, axis)[-1]

    axes = " ".join("btnk"[: x.ndim])
    return sharding.over_devices(
      run,
      (x, starts, kernel),
      (axes, None if starts is None else "b t", f"_{axes[3:]}"),
      (axes, axes.replace("t", "_")),
      letters="btn",
    )

  def _continue(self, kernel, x, state, starts, count):
    """Convolves what comes after a state; returns y and the next one."""
    if any(spec := sharding.spec_of(x)):
      state = jax.reshard(state, jax.P(*spec))
    age = None
    if starts is not None:
      # Old enough to see all of the state, which is zero where there was none.
      old = jnp.full(x.shape[:1], self.width - 1, jnp.int32)
      age = token_layout.age_in_document(starts, old)
    inputs = jnp.concatenate([state, x.astype(jnp.float32)], axis=1)
    y = self._convolve(kernel, inputs, age).astype(self.dtype)
    return y, self._last(inputs, age, count)

  def _convolve(self, kernel, inputs, age):
    kernel = kernel.astype(jnp.float32)
    t = inputs.shape[1] - (self.width - 1)
    y = jnp.zeros_like(inputs[:, :t])
    for offset in range(self.width):
      first = self.width - 1 - offset
      x = inputs[:, first : first + t]
      if age is not None and offset > 0:
        x = token_layout.zero_masked(x, age >= offset)
      y += numerics.scale_axes(x, kernel[offset])
    return y

  def _last(self, inputs, age, count):
    """The last inputs of each row that belong to its last document."""
    length, tail = inputs.shape[1], self.width - 1
    if count is None:
      last = inputs[:, length - tail :]
      age = None if age is None else age[:, -1]
    else:
      index = count[:, None] + jnp.arange(tail)[None]
      last = token_layout.take_tokens(inputs, index)
      if age is not None:
        # Of the state before the first token.
        age = jnp.pad(age, [(0, 0), (1, 0)], constant_values=tail)
        age = token_layout.take_tokens(age, count)
    if age is None:
      return last
    distance = jnp.arange(tail - 1, -1, -1)[None]
    return token_layout.zero_masked(last, age[:, None] >= distance)
