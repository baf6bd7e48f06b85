"""Gates: what a memory asks for, made from the input of its layer."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax import numerics
from memcache_jax.array_typing import Array, DType, Float
from memcache_jax.layers._params import NoDecayParam, Projection
from memcache_jax.memories import Gate, HeadShape
from memcache_jax.ops import _checks

# Mamba-2's initial ranges: decay rates, and time steps (log-uniform).
_RATE = (1e-3, 16.0)
_TIME_STEP = (1e-3, 0.1)

_KINDS = ("log_decay", "dt", "sigmoid", "linear", "connector", "direction")


class Gates(nnx.Module):
  r"""One projection per gate, float32 out, by the kind of the gate.

  =========== ============================================================
  log_decay   ``-exp(A_log) softplus(h W + dt_bias)``, Mamba-2
              (arXiv 2405.21060): the logarithm itself, so that no decay
              is too strong or too weak to be exact; ``exp(A_log)`` is at
              the start `scale` times what it is there
  dt          the ``softplus(h W + dt_bias)`` of that same decay
  sigmoid     ``scale * sigmoid(h W + bias)``
  linear      ``h W + bias``
  connector   ``h W``
  direction   ``h W / |h W|``
  =========== ============================================================

  Args:
    dim: model width.
    shape: sizes of the heads.
    gates: what `Memory.gates` returned.
    dtype: of the operands of the products of connectors and directions, the
      only large ones; all others are float32.
    param_dtype: of the stored kernels; biases and rates are float32.
    rngs: where the initial weights come from.

  Raises:
    ValueError: for a kind that does not exist, or for "dt" without exactly
      one "log_decay".

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.layers import Gates
    >>> from memcache_jax.memories import Gate, HeadShape
    >>> gates = {"write": Gate("sigmoid", width=2)}
    >>> gates = Gates(8, HeadShape(4, 2, 2), gates, rngs=nnx.Rngs(0))
    >>> gates(jnp.ones((1, 3, 8)))["write"].shape
    (1, 3, 4, 2)
  """

  def __init__(
    self,
    dim: int,
    shape: HeadShape,
    gates: Mapping[str, Gate],
    *,
    dtype: DType = jnp.float32,
    param_dtype: DType = jnp.float32,
    rngs: nnx.Rngs,
  ):
    _check(gates)
    # As pairs, since the attributes of a module must be hashable.
    self.specs = tuple(sorted(gates.items()))
    made = {}
    for name, gate in self.specs:
      if gate.kind in ("connector", "direction"):
        made[name] = Projection(
          "dnk",
          (dim, shape.num_heads, shape.key_dim),
          dtype=dtype,
          param_dtype=param_dtype,
          rngs=rngs,
        )
      elif gate.kind == "log_decay":
        made[name] = _Decay(dim, shape, gate, param_dtype, rngs)
      elif gate.kind != "dt":
        made[name] = _Affine(dim, shape, gate, param_dtype, rngs)
    self.projections = nnx.Dict(made)

  def __call__(
    self, h: Float[Array, "b t d"]
  ) -> dict[str, Float[Array, "b t n ..."]]:
    """The gates of every token, by name."""
    gates, time_step = {}, None
    for name, gate in self.specs:
      match gate.kind:
        case "log_decay":
          gates[name], time_step = self.projections[name](h)
        case "sigmoid":
          gates[name] = gate.scale * jax.nn.sigmoid(self.projections[name](h))
        case "linear":
          gates[name] = self.projections[name](h)
        case "connector":
          gates[name] = self.projections[name](h, jnp.float32)
        case "direction":
          gates[name] = numerics.l2_normalize(
            self.projections[name](h, jnp.float32)
          )
    for name, gate in self.specs:
      if gate.kind == "dt":
        gates[name] = time_step
    return gates


def _check(gates: Mapping[str, Gate]) -> None:
  _checks.check_mapping(Gate, gates=gates)
  kinds = [gate.kind for gate in gates.values()]
  for name, gate in gates.items():
    _checks.check_choice(**{f"gates[{name!r}].kind": (gate.kind, _KINDS)})
  if "dt" in kinds and kinds.count("log_decay") != 1:
    raise ValueError(
      "`gates` must hold exactly one 'log_decay' for the kind 'dt' to share: "
      f"got {kinds.count('log_decay')}."
    )


def _kernel(dim, shape, gate, param_dtype, rngs) -> Projection:
  last = gate.axes(shape.key_dim)
  return Projection(
    "dnw" if last else "dn",
    (dim, shape.num_heads, *last),
    param_dtype=param_dtype,
    rngs=rngs,
  )


class _Affine(nnx.Module):
  """``h W + bias`` in float32."""

  def __init__(self, dim, shape, gate, param_dtype, rngs):
    self.projection = _kernel(dim, shape, gate, param_dtype, rngs)
    bias = jnp.asarray(gate.bias, jnp.float32)
    self.bias = NoDecayParam(
      jnp.broadcast_to(bias, self.projection.kernel.shape[1:])
    )

  def __call__(self, h):
    return self.projection(h) + self.bias[...][None, None]


class _Decay(nnx.Module):
  """``-exp(A_log) dt`` and ``dt = softplus(h W + dt_bias)``, in float32."""

  def __init__(self, dim, head_shape, gate, param_dtype, rngs):
    self.projection = _kernel(dim, head_shape, gate, param_dtype, rngs)
    shape = self.projection.kernel.shape[1:]
    low, high = _RATE
    rate = jax.random.uniform(rngs.params(), shape, minval=low, maxval=high)
    low, high = _TIME_STEP
    time_step = low * (high / low) ** jax.random.uniform(rngs.params(), shape)
    self.A_log = NoDecayParam(jnp.log(gate.scale * rate))
    # The inverse of softplus.
    self.dt_bias = NoDecayParam(time_step + jnp.log(-jnp.expm1(-time_step)))

  def __call__(self, h):
    time_step = jax.nn.softplus(
      self.projection(h) + self.dt_bias[...][None, None]
    )
    return -jnp.exp(self.A_log[...])[None, None] * time_step, time_step
