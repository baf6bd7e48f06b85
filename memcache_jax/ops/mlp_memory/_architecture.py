"""What network a memory is: affine maps, and what stands between them.

An architecture says how its affine maps are joined, not how one is computed:
`forward` is handed a function `affine(name, x)`. So one definition serves a
plain read, the key pass (which perturbs every map's output), the read inside
an inner batch (which adds low-rank updates) and Memory Soup (which mixes maps).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Params, PRNGKeyArray
from memcache_jax.ops import _checks
from memcache_jax.ops.mlp_memory._product import product

Affine: TypeAlias = Callable[
  [str, Float[Array, "b n t i"]], Float[Array, "b n t o"]
]

_LAYER_NORM_EPS = 1e-6
_ACTIVATIONS = {
  "gelu": jax.nn.gelu,
  "silu": jax.nn.silu,
  "relu": jax.nn.relu,
}


class AffineShape(NamedTuple):
  """Sizes of one affine map."""

  in_dim: int
  out_dim: int
  bias: bool = False


@dataclass(frozen=True)
class Architecture:
  """A network of named affine maps; subclass it to write your own.

  Maps are named after their weight: "w", "w_in", ...; the bias of "w_in" is
  "b_in". Everything between maps works along the last axis, so that tokens
  stay independent; every map is used exactly once.
  """

  @property
  def has_norm(self) -> bool:
    """Whether a norm bounds its output: the option `norm`, if it has one."""
    return getattr(self, "norm", False)

  def affine_maps(
    self, key_dim: int, value_dim: int
  ) -> Mapping[str, AffineShape]:
    """The affine maps, which the memory trains, by name."""
    raise NotImplementedError

  def static_params(
    self, num_heads: int, value_dim: int
  ) -> dict[str, Float[Array, "n v"]]:
    """Initial parameters that only the outer loss trains."""
    del num_heads, value_dim
    return {}

  def forward(
    self,
    affine: Affine,
    static: Params,
    x: Float[Array, "b n t k"],
  ) -> Float[Array, "b n t v"]:
    """The network.

    Args:
      affine: computes the named map of its input.
      static: the parameters of `static_params`, shaped [1 n 1 v].
      x: its input, float32.
    """
    raise NotImplementedError

  def init_params(
    self,
    key: PRNGKeyArray,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    std: float | None = None,
  ) -> Params:
    """Weights ``N(0, std^2)``, std None for 1/sqrt(fan in); biases 0."""
    maps = self.affine_maps(key_dim, value_dim)
    params = self.static_params(num_heads, value_dim)
    keys = jax.random.split(key, len(maps))
    for map_key, (name, size) in zip(keys, maps.items(), strict=True):
      scale = size.in_dim**-0.5 if std is None else std
      shape = (num_heads, size.in_dim, size.out_dim)
      params[name] = scale * jax.random.normal(map_key, shape, jnp.float32)
      if size.bias:
        params[bias_name(name)] = jnp.zeros(
          (num_heads, size.out_dim), jnp.float32
        )
    return params


@dataclass(frozen=True)
class MLP(Architecture):
  r"""``M(x) = x + LN(W_L act(... act(x W_1)))``, in row vectors.

  Memory Caching (arXiv 2602.24281), appendix B: depth 2, GELU, width factor
  4; the layer norm in its text, not in its formula, is as in Miras
  (arXiv 2504.13173) and TTT (arXiv 2407.04620).

  Attributes:
    depth: affine maps, 1 to 4. Depth 1 names its map "w", others
      "w_in", "w_2", ..., "w_out".
    hidden_factor: hidden width in key widths.
    residual: adds x; needs key width = value width.
    norm: layer norm, whose gain and bias are not part of the memory.
    bias: biases in the affine maps.
    activation: "gelu" (tanh form), "silu" or "relu".
  """

  depth: int = 2
  hidden_factor: int = 4
  residual: bool = True
  norm: bool = True
  bias: bool = False
  activation: Literal["gelu", "silu", "relu"] = "gelu"

  def __post_init__(self):
    _checks.check_positive(depth=self.depth, hidden_factor=self.hidden_factor)
    _checks.check_choice(
      activation=(self.activation, tuple(_ACTIVATIONS)),
      depth=(self.depth, (1, 2, 3, 4)),
    )

  @classmethod
  def matrix(cls) -> "MLP":
    """``M(x) = x W``, the memory of linear attention."""
    return cls(depth=1, residual=False, norm=False)

  @classmethod
  def ttt_linear(cls) -> "MLP":
    """``M(x) = x + LN(x W + b)``, TTT-Linear's."""
    return cls(depth=1, bias=True)

  @classmethod
  def ttt_mlp(cls) -> "MLP":
    """``M(x) = x + LN(GELU(x W_1 + b_1) W_2 + b_2)``, TTT-MLP's."""
    return cls(depth=2, bias=True)

  def _names(self):
    if self.depth == 1:
      return ["w"]
    middle = [f"w_{i}" for i in range(2, self.depth)]
    return ["w_in", *middle, "w_out"]

  def affine_maps(self, key_dim, value_dim):
    if self.residual:
      _check_residual(key_dim, value_dim)
    hidden = self.hidden_factor * key_dim
    widths = [key_dim, *[hidden] * (self.depth - 1), value_dim]
    return {
      name: AffineShape(i, o, self.bias)
      for name, i, o in zip(self._names(), widths[:-1], widths[1:], strict=True)
    }

  def static_params(self, num_heads, value_dim):
    return _norm_params(num_heads, value_dim) if self.norm else {}

  def forward(self, affine, static, x):
    names = self._names()
    z = affine(names[0], x)
    for name in names[1:]:
      z = affine(name, _ACTIVATIONS[self.activation](z))
    if self.norm:
      z = _layer_norm(z, static)
    return x + z if self.residual else z


@dataclass(frozen=True)
class GatedMLP(Architecture):
  """``M(x) = [x +] [LN] (SiLU(x W_gate) * (x W_up)) W_down``.

  LaCT (arXiv 2505.23884), width factor 1 and nothing added; Atlas
  (arXiv 2505.23735) adds x.

  Attributes:
    hidden_factor: hidden width in key widths.
    residual: adds x; needs key width = value width.
    norm: layer norm, whose gain and bias are not part of the memory.
  """

  hidden_factor: int = 1
  residual: bool = False
  norm: bool = False

  def __post_init__(self):
    _checks.check_positive(hidden_factor=self.hidden_factor)

  def affine_maps(self, key_dim, value_dim):
    if self.residual:
      _check_residual(key_dim, value_dim)
    hidden = self.hidden_factor * key_dim
    return {
      "w_gate": AffineShape(key_dim, hidden),
      "w_up": AffineShape(key_dim, hidden),
      "w_down": AffineShape(hidden, value_dim),
    }

  def static_params(self, num_heads, value_dim):
    return _norm_params(num_heads, value_dim) if self.norm else {}

  def forward(self, affine, static, x):
    gate = jax.nn.silu(affine("w_gate", x))
    z = affine("w_down", gate * affine("w_up", x))
    if self.norm:
      z = _layer_norm(z, static)
    return x + z if self.residual else z


def bias_name(name: str) -> str:
  """The bias that belongs to a weight."""
  return "b" + name[1:]


def is_bias(name: str) -> bool:
  """Whether a trained parameter is a bias."""
  return name.startswith("b")


def weights_of(architecture: Architecture, params: Params) -> Params:
  """What of the parameters the memory itself trains (any leading axes)."""
  static = static_names(architecture)
  return {name: x for name, x in params.items() if name not in static}


def static_of(architecture: Architecture, params: Params) -> Params:
  """The other parameters, shaped to meet [b n t v]."""
  return {
    name: params[name].astype(jnp.float32)[None, :, None]
    for name in static_names(architecture)
  }


def static_names(architecture: Architecture) -> list[str]:
  """Names of the parameters that the memory itself does not train."""
  return sorted(jax.eval_shape(lambda: architecture.static_params(1, 1)))


def apply_affine(
  weights: Params, name: str, x: Float[Array, "b n t i"], dtype: jnp.dtype
) -> Float[Array, "b n t o"]:
  """``x W + b`` of one map, float32; weights [b n ...]."""
  z = product(x, weights[name], dtype)
  bias = weights.get(bias_name(name))
  return z if bias is None else z + bias[:, :, None]


def apply_architecture(
  architecture: Architecture,
  params: Params,
  weights: Params,
  x: Float[Array, "b t n k"],
) -> Float[Array, "b t n v"]:
  """Reads a memory: weights [b n ...], static parameters out of `params`."""
  read = architecture.forward(
    lambda name, z: apply_affine(weights, name, z, x.dtype),
    static_of(architecture, params),
    jnp.swapaxes(x, 1, 2).astype(jnp.float32),
  )
  return jnp.swapaxes(read, 1, 2).astype(x.dtype)


def _layer_norm(z, static):
  mean = jnp.mean(z, axis=-1, keepdims=True)
  z = z - mean
  variance = jnp.mean(z * z, axis=-1, keepdims=True)
  z = z * jax.lax.rsqrt(variance + _LAYER_NORM_EPS)
  return z * static["ln_gain"] + static["ln_bias"]


def _norm_params(num_heads, value_dim):
  return {
    "ln_gain": jnp.ones((num_heads, value_dim), jnp.float32),
    "ln_bias": jnp.zeros((num_heads, value_dim), jnp.float32),
  }


def _check_residual(key_dim, value_dim):
  if key_dim != value_dim:
    raise ValueError(
      "`residual` needs keys and values of one width: got "
      f"k={key_dim}, v={value_dim}."
    )
