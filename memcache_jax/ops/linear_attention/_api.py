"""`linear_attention`: checks, masking and choice of implementation."""

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.linear_attention import _chunked, _reference
from memcache_jax.ops.linear_attention._state import (
  LinearAttentionState,
  init_state,
)


def linear_attention(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  *,
  log_decay: Float[Array, "b t n"] | None = None,
  write: Float[Array, "b t n w"] | None = None,
  state: LinearAttentionState | None = None,
  mask: Bool[Array, "b t"] | None = None,
  starts: Bool[Array, "b t"] | None = None,
  chunk_size: int = 64,
  implementation: _dispatch.Implementation | None = None,
) -> tuple[Float[Array, "b t n v"], LinearAttentionState]:
  r"""Linear attention with decay, write strength and a sliding write window.

  .. math::
    S_t = a_t S_{t-1} + \sum_{o=0}^{w-1} \beta_{t,o}\, k_{t-o}^T v_{t-o},
    \qquad y_t = q_t S_t

  Memory Caching (arXiv 2602.24281), Eq. 26-28, in row vectors; ``w = 1`` is
  Mamba-2-style decayed linear attention and without decay and write strength
  plain linear attention. ``y_t`` is read after token ``t`` was written.

  Args:
    q: queries; float32 or bfloat16, like k and v.
    k: keys.
    v: values.
    log_decay: logarithm of the decay ``a_t``, ``<= 0``; ``-inf`` forgets
      everything. None: no decay.
    write: entry ``o`` is the weight, at this step, of the token ``o`` steps
      earlier. None: 1 for the token itself.
    state: what an earlier call returned. None: nothing written yet.
    mask: False for tokens that do not exist: no write, no decay, no place in
      the window; their y is 0.
    starts: True at the first token of a document, before which everything is
      forgotten; ignored on masked tokens.
    chunk_size: tokens computed in parallel; changes speed only.
    implementation: "reference" (token by token), "xla" (chunk-parallel) or
      None for the fastest.

  Returns:
    y, in the dtype of v, and the state after the last token, in float32.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation does not exist.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from memcache_jax.ops import linear_attention
    >>> x = jnp.ones((1, 3, 1, 2))
    >>> y, state = jax.jit(linear_attention)(x, x, x)
    >>> y[0, :, 0, 0].tolist()
    [2.0, 4.0, 6.0]
  """
  _check(q, k, v, log_decay, write, state, mask, starts, chunk_size)
  name = _dispatch.resolve("linear_attention", implementation)
  window = 1 if write is None else write.shape[-1]
  if mask is not None:
    # Whatever a masked token holds, even nan, must not reach a product.
    q, k, v, log_decay, write, starts = token_layout.zero_masked(
      (q, k, v, log_decay, write, starts), mask
    )
  empty = state is None
  if state is None:
    state = init_state(q, v, window)
  if name == "reference":
    return _reference.linear_attention(
      q, k, v, log_decay, write, state, mask, starts
    )
  return _chunked.linear_attention(
    q, k, v, log_decay, write, state, mask, starts, chunk_size, empty=empty
  )


def _check(q, k, v, log_decay, write, state, mask, starts, chunk_size):
  _checks.check_shapes(
    {
      "q": (q, "b t n k"),
      "k": (k, "b t n k"),
      "v": (v, "b t n v"),
      "log_decay": (log_decay, "b t n"),
      "write": (write, "b t n w"),
      "mask": (mask, "b t"),
      "starts": (starts, "b t"),
    }
  )
  _checks.check_floating(q=q, k=k, v=v, log_decay=log_decay, write=write)
  _checks.check_same_dtype(q=q, k=k, v=v)
  _checks.check_bool(mask=mask, starts=starts)
  _checks.check_positive(chunk_size=chunk_size)
  if state is None:
    return
  window = 1 if write is None else write.shape[-1]
  if (state.keys is None) != (window == 1):
    raise ValueError(
      f"`state` must come from a call with the same window (w={window}): "
      f"its keys are {'missing' if state.keys is None else 'present'}."
    )
  _checks.check_shapes(
    {
      "q": (q, "b t n k"),
      "v": (v, "b t n v"),
      "state.matrix": (state.matrix, "b n k v"),
      "state.keys": (state.keys, f"b {window - 1} n k"),
      "state.values": (state.values, f"b {window - 1} n v"),
    }
  )
