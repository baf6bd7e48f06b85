"""`diagonal_delta_rule`: checks, masking and choice of implementation."""

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops import _dispatch
from memcache_jax.ops.delta_rule import _arguments, _chunks
from memcache_jax.ops.diagonal_delta_rule import _chunked, _reference


def diagonal_delta_rule(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  log_decay: Float[Array, "b t n k"],
  removal_key: Float[Array, "b t n k"],
  rate: Float[Array, "b t n k"],
  *,
  state: Float[Array, "b n k v"] | None = None,
  initial: Float[Array, "n k v"] | None = None,
  mask: Bool[Array, "b t"] | None = None,
  starts: Bool[Array, "b t"] | None = None,
  chunk_size: int = 32,
  implementation: _dispatch.Implementation | None = None,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b n k v"]]:
  r"""Delta rule with a decay per key channel and a key of its own to remove.

  .. math::
    S_t = \mathrm{diag}(w_t) S_{t-1}
      - (\eta_t \odot \kappa_t)^T (\kappa_t S_{t-1}) + k_t^T v_t,
    \qquad y_t = q_t S_t

  RWKV-7 (arXiv 2503.14456), section 4, in row vectors, with the decay ``w``,
  the removal key ``kappa`` and the rate ``eta``. ``y_t`` is read after token
  ``t`` was written.

  Args:
    q: queries ("receptance"); float32 or bfloat16, like k and v.
    k: keys.
    v: values.
    log_decay: logarithm of the decay ``w_t``, ``<= 0``, as strong as may be;
      ``-inf`` forgets the channel.
    removal_key: direction ``kappa_t`` whose value is removed, of unit length.
    rate: how much of it is removed, per channel, in [0, 1].
    state: what an earlier call returned. None: a new document.
    initial: memory of a new document. None: zero.
    mask: False for tokens that do not exist: no write, no decay; their y is 0.
    starts: True at the first token of a document, at which the memory becomes
      `initial`; ignored on masked tokens.
    chunk_size: tokens computed in parallel, rounded up to a power of two;
      changes speed only.
    implementation: "reference" (token by token), "xla" (chunk-parallel) or
      None for the fastest.

  Returns:
    y, in the dtype of v, and the memory after the last token, in float32.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation does not exist.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from memcache_jax.ops import diagonal_delta_rule
    >>> key = jnp.ones((1, 3, 1, 1))
    >>> value = jnp.arange(3.0)[None, :, None, None]
    >>> arguments = key, key, value, 0 * key, key, key
    >>> y, state = jax.jit(diagonal_delta_rule)(*arguments)
    >>> y[0, :, 0, 0].tolist()
    [0.0, 1.0, 2.0]
  """
  _arguments.check(
    q,
    k,
    v,
    gates={
      "log_decay": (log_decay, "b t n k"),
      "removal_key": (removal_key, "b t n k"),
      "rate": (rate, "b t n k"),
    },
    state=state,
    initial=initial,
    mask=mask,
    starts=starts,
    chunk_size=chunk_size,
  )
  name = _dispatch.resolve("diagonal_delta_rule", implementation)
  if mask is not None:
    # Whatever a masked token holds, even nan, must not reach a product. All
    # zeros, it writes nothing, and it decays nothing.
    q, k, v, log_decay, removal_key, rate, starts = token_layout.zero_masked(
      (q, k, v, log_decay, removal_key, rate, starts), mask
    )
  state = _chunks.initial_state(q, v, state, initial)
  if name == "reference":
    return _reference.diagonal_delta_rule(
      q, k, v, log_decay, removal_key, rate, state, initial, starts
    )
  return _chunked.diagonal_delta_rule(
    q, k, v, log_decay, removal_key, rate, state, initial, starts, chunk_size
  )
