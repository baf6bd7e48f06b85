"""`cached_linear_attention`: checks, gradient, choice of implementation."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import Array, Bool, Float
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.cached_linear_attention import (
  _chunked,
  _kernels,
  _reference,
)
from memcache_jax.ops.cached_linear_attention._inputs import (
  Cut,
  Inputs,
  WriteMode,
)

_NAME = "cached_linear_attention"


def cached_linear_attention(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  weights: Float[Array, "b t n slots"],
  own_weight: Float[Array, "b t n"],
  *,
  segment_length: int,
  log_decay: Float[Array, "b t n"] | None = None,
  write: Float[Array, "b t n"] | None = None,
  memories: Float[Array, "b s n k v"] | None = None,
  state: Float[Array, "b n k v"] | None = None,
  fresh: Bool[Array, "b g"] | None = None,
  write_mode: WriteMode = "independent",
  chunk_size: int = 64,
  implementation: _dispatch.Implementation | None = None,
) -> tuple[Float[Array, "b t n v"], Float[Array, "b g n k v"]]:
  r"""Decayed linear attention by segments, whose end states are read, too.

  .. math::
    S_t = a_t S_{t-1} + \beta_t\, k_t^T v_t, \qquad
    y_t = \gamma_t\, q_t S_t + \sum_{i<s(t)} \gamma_{t,i}\, q_t S^{(i)}

  Memory Caching (arXiv 2602.24281), Eq. 4-9, for matrix memories in row
  vectors: ``S^(i)`` are the memories carried into the call and the states at
  the end of its segments ``i``, of which a token of segment ``s`` reads the
  earlier ones. A token that does not exist has zero k, v and log_decay.

  Args:
    q: queries; float32 or bfloat16, like k and v.
    k: keys.
    v: values.
    weights: gates of the s memories carried into the call, then of the end
      states of its g segments; ignored where a token may not read them.
    own_weight: gate of the online memory.
    segment_length: tokens of a segment; the last one may have fewer.
    log_decay: logarithm of the decay ``a_t``, ``<= 0``. None: no decay.
    write: write strength. None: 1.
    memories: carried into the call, float32. None: none are.
    state: online memory before the call, float32, with which its first segment
      goes on. None: nothing written.
    fresh: segments at which a document starts: before them everything is
      forgotten. What they may read is for `weights` to say. None: none is.
    write_mode: "independent": every segment starts from nothing. "checkpoint":
      from the end of the one before.
    chunk_size: tokens computed in parallel; changes speed only.
    implementation: "reference" (token by token), "xla", "mosaic_tpu", "triton"
      or None for the kernel on a TPU, and "xla" elsewhere.

  Returns:
    y, in the dtype of v, and the end states of all segments, in float32.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, unless it is "reference" or "xla".
    TypeError: by JAX, on derivatives in forward mode, likewise.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from memcache_jax.ops import cached_linear_attention
    >>> x, gates = jnp.ones((1, 4, 1, 2)), jnp.ones((1, 4, 1, 2))
    >>> read = jax.jit(
    ...   cached_linear_attention, static_argnames="segment_length"
    ... )
    >>> y, ends = read(x, x, x, gates, gates[..., 0], segment_length=2)
    >>> y[0, :, 0, 0].tolist()
    [2.0, 4.0, 6.0, 8.0]
  """
  inputs = Inputs(
    q, k, v, weights, own_weight, log_decay, write, memories, state
  )
  carried = 0 if memories is None else memories.shape[1]
  _checks.check_positive(segment_length=segment_length, chunk_size=chunk_size)
  _checks.check_choice(write_mode=(write_mode, ("independent", "checkpoint")))
  cut = Cut(segment_length, q.shape[1], carried, write_mode)
  _check(inputs, fresh, cut)
  if 0 in q.shape[:3]:
    b, _, n, key_dim = q.shape
    ends = (b, cut.segments, n, key_dim, v.shape[-1])
    return v, jnp.zeros(ends, jnp.float32)
  why_not = {}
  if implementation not in ("reference", "xla"):
    why_not = _kernels.why_not(**_kernels.sizes(inputs, cut))
  choice = _dispatch.resolve(_NAME, implementation, why_not)
  if choice == "reference":
    return _reference.cached_linear_attention(inputs, fresh, cut)
  if choice == "xla":
    return _chunked.cached_linear_attention(inputs, fresh, cut, chunk_size)
  kernels = tuple(name for name, reason in why_not.items() if reason is None)
  return _by_kernel(_Options(cut, chunk_size, choice, kernels), inputs, fresh)


def _check(inputs, fresh, cut):
  slots = cut.carried + cut.segments
  _checks.check_shapes(
    {
      "q": (inputs.q, "b t n k"),
      "k": (inputs.k, "b t n k"),
      "v": (inputs.v, "b t n v"),
      "weights": (inputs.weights, f"b t n {slots}"),
      "own_weight": (inputs.own_weight, "b t n"),
      "log_decay": (inputs.log_decay, "b t n"),
      "write": (inputs.write, "b t n"),
      "memories": (inputs.memories, "b s n k v"),
      "state": (inputs.state, "b n k v"),
      "fresh": (fresh, f"b {cut.segments}"),
    }
  )
  _checks.check_floating(**inputs._asdict())
  _checks.check_same_dtype(q=inputs.q, k=inputs.k, v=inputs.v)
  _checks.check_bool(fresh=fresh)


@dataclass(frozen=True)
class _Options:
  """What is known without the arrays."""

  cut: Cut
  chunk_size: int
  choice: _dispatch.Choice
  kernels: tuple[str, ...]

  def rules(self, **rules):
    """Those of the kernels that can take the call."""
    return {
      name: functools.partial(rules[name], self.cut) for name in self.kernels
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(options, inputs, fresh):
  return _forward(options, inputs, fresh)[0]


# Axes of what goes in and comes out, for devices that hold a part of it.
_AXES = (
  *("b t n k", "b t n k", "b t n v", "b t n s", "b t n"),
  *("b t n", "b t n", "b s n k v", "b n k v"),
)
_OUTPUT_AXES = ("b t n v", "b g n k v")


def _axes_of(inputs, fresh):
  present = lambda axes, x: None if x is None else axes
  axes = Inputs._make(map(present, _AXES, inputs))
  return axes, present("b g", fresh)


def _forward(options, inputs, fresh):
  def forward(inputs, fresh):
    return _dispatch.run(
      options.choice,
      lambda inputs, fresh: _chunked.cached_linear_attention(
        inputs, fresh, options.cut, options.chunk_size
      ),
      options.rules(mosaic_tpu=_kernels.mosaic_tpu, triton=_kernels.triton),
      *(inputs, fresh),
    )

  def spread(*args):
    return sharding.over_devices(forward, args, _axes_of(*args), _OUTPUT_AXES)

  outputs = _dispatch.first_order(_NAME, spread, inputs, fresh)
  return outputs, (inputs, fresh, outputs[1])


def _backward(options, residuals, gradients):
  inputs, fresh, ends = residuals

  def xla(inputs, fresh, ends, gradients):
    del ends
    forward = lambda inputs: _chunked.cached_linear_attention(
      inputs, fresh, options.cut, options.chunk_size
    )
    return jax.vjp(forward, inputs)[1](gradients)[0]

  def backward(inputs, fresh, ends, gradients):
    return _dispatch.run(
      options.choice,
      xla,
      options.rules(
        mosaic_tpu=_kernels.mosaic_tpu_vjp, triton=_kernels.triton_vjp
      ),
      *(inputs, fresh, ends, gradients),
    )

  def spread(*args):
    axes = _axes_of(inputs, fresh)
    all_axes = (*axes, _OUTPUT_AXES[1], _OUTPUT_AXES)
    return sharding.over_devices(backward, args, all_axes, axes[0])

  args = (inputs, fresh, ends, gradients)
  return _dispatch.first_order(_NAME, spread, *args), None


_by_kernel.defvjp(_forward, _backward)
