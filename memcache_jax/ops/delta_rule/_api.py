"""`delta_rule`: checks, masking, gradient, choice of implementation."""

import functools

import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops import _dispatch
from memcache_jax.ops.delta_rule import (
  _arguments,
  _chunked,
  _chunks,
  _kernels,
  _reference,
)

_NAME = "delta_rule"


def delta_rule(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  beta: Float[Array, "b t n"],
  *,
  log_decay: Float[Array, "b t n"] | None = None,
  state: Float[Array, "b n k v"] | None = None,
  initial: Float[Array, "n k v"] | None = None,
  mask: Bool[Array, "b t"] | None = None,
  starts: Bool[Array, "b t"] | None = None,
  chunk_size: int = 64,
  implementation: _dispatch.Implementation | None = None,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b n k v"]]:
  r"""Delta rule: replaces what the memory returns for a key by a new value.

  .. math::
    S_t = a_t S_{t-1} + \beta_t k_t^T (v_t - a_t k_t S_{t-1}),
    \qquad y_t = q_t S_t

  Gated DeltaNet (arXiv 2412.06464), section 3.1, in row vectors; without
  decay it is DeltaNet (arXiv 2406.06484), section 2.2. ``y_t`` is read after
  token ``t`` was written.

  The memory stays bounded while ``beta_t |k_t|^2 <= 2``.

  Args:
    q: queries; float32 or bfloat16, like k and v.
    k: keys, best of unit length.
    v: values.
    beta: write strength, in [0, 1], or in [0, 2] to let the memory flip signs.
    log_decay: logarithm of the decay ``a_t``, ``<= 0``; ``-inf`` forgets
      everything. None: no decay.
    state: what an earlier call returned. None: a new document.
    initial: memory of a new document. None: zero.
    mask: False for tokens that do not exist: no write, no decay; their y is 0.
    starts: True at the first token of a document, at which the memory becomes
      `initial`; ignored on masked tokens.
    chunk_size: tokens computed in parallel, rounded up to a power of two;
      changes speed only.
    implementation: "reference" (token by token), "xla" (chunk-parallel),
      "mosaic_tpu", "triton" (for GPUs; compiled but not yet run on one) or
      None for the kernel on a TPU, and "xla" elsewhere and for one token.

  Returns:
    y, in the dtype of v, and the memory after the last token, in float32.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, where it may run as a kernel: those are for "xla".
    TypeError: by JAX, on derivatives in forward mode there.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from memcache_jax.ops import delta_rule
    >>> key = jnp.ones((1, 3, 1, 1))
    >>> value = jnp.arange(3.0)[None, :, None, None]
    >>> y, state = jax.jit(delta_rule)(key, key, value, jnp.ones((1, 3, 1)))
    >>> y[0, :, 0, 0].tolist()
    [0.0, 1.0, 2.0]
  """
  _arguments.check(
    q,
    k,
    v,
    gates={"beta": (beta, "b t n"), "log_decay": (log_decay, "b t n")},
    state=state,
    initial=initial,
    mask=mask,
    starts=starts,
    chunk_size=chunk_size,
  )
  if 0 in q.shape[:3] or (implementation is None and q.shape[1] == 1):
    implementation = "xla"  # a kernel would fill a chunk up with nothing
  why_not = {}
  if implementation not in ("reference", "xla"):
    why_not = _kernels.why_not(q, v)
  choice = _dispatch.resolve(_NAME, implementation, why_not)
  if mask is not None:
    # Whatever a masked token holds, even nan, must not reach a product. All
    # zeros, it writes nothing, and it decays nothing.
    q, k, v, beta, log_decay, starts = token_layout.zero_masked(
      (q, k, v, beta, log_decay, starts), mask
    )
  state = _chunks.initial_state(q, v, state, initial)
  if choice == "reference":
    return _reference.delta_rule(
      q, k, v, beta, log_decay, state, initial, starts
    )
  if choice == "xla":
    return _chunked.delta_rule(
      q, k, v, beta, log_decay, state, initial, starts, chunk_size
    )
  return _by_kernel(
    choice, chunk_size, q, k, v, beta, log_decay, state, initial, starts
  )


def _by_kernel(
  choice, chunk_size, q, k, v, beta, log_decay, state, initial, starts
):
  inputs = [q, k, v, beta, log_decay, state, None]
  axes = ["b t n k", "b t n k", "b t n v", "b t n", None, "b n k v", None]
  if log_decay is not None:
    axes[4] = "b t n"
  if starts is not None:
    if initial is not None:
      # Of every row: what rows share would be summed up on each device alone.
      rows = jnp.zeros_like(state)
      inputs[6], axes[6] = rows + initial.astype(jnp.float32)[None], "b n k v"
    inputs.append(starts)
    axes.append("b t")
  return _dispatch.run_spread(
    _NAME,
    choice,
    functools.partial(_xla, chunk_size),
    {"mosaic_tpu": _kernels.mosaic_tpu, "triton": _kernels.triton},
    {"mosaic_tpu": _kernels.mosaic_tpu_vjp, "triton": _kernels.triton_vjp},
    tuple(inputs),
    tuple(axes),
    ("b t n v", "b n k v"),
  )


def _xla(chunk_size, q, k, v, beta, log_decay, state, initial, starts=None):
  if initial is not None:
    initial = initial[0]  # all rows have the same one
  return _chunked.delta_rule(
    q, k, v, beta, log_decay, state, initial, starts, chunk_size
  )
