"""The answers that compose a memory, besides its network and inner loss."""

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Literal

import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Params
from memcache_jax.memories._base import Gate
from memcache_jax.ops import _checks
from memcache_jax.ops.mlp_memory import (
  Architecture,
  Closing,
  Dot,
  EntropyClosing,
  InnerLoss,
  MuonClosing,
  NormClosing,
)

# Rates of the decays of networks at the start, over those of linear memories:
# at most 0.0016 per token. Gradients grow without bound once a network has
# forgotten itself by some exp(-10); so they are fine up to 6,000 tokens here.
DECAY_SCALE = 1 / 1024


@dataclass(frozen=True)
class Retention:
  """What a memory keeps of its past.

  Attributes:
    decay: multiplies the weights by the gate "log_decay" at every token;
      False keeps everything.
    norm: the weights read are ``A / |A|_q^{q-2}`` for this q, and A is what is
      stored (Moneta); None reads what is stored.
    entropy: weights stay positive with a constant sum; at the end of every
      inner batch the step is taken in their logarithms (Memora).
  """

  decay: bool = True
  norm: float | None = None
  entropy: bool = False

  def __post_init__(self):
    if self.norm is not None and self.entropy:
      raise ValueError("`norm` and `entropy` must not both be set.")
    if self.norm is not None and self.norm < 2:
      raise ValueError(f"`norm` must be at least 2: got {self.norm}.")

  @property
  def closing(self) -> Closing:
    if self.entropy:
      return EntropyClosing()
    return Closing() if self.norm is None else NormClosing(self.norm)


@dataclass(frozen=True)
class Optimizer:
  """How a memory follows its inner gradients.

  Attributes:
    momentum: the gate "momentum" carries a running sum of steps.
    muon: orthogonalise the momentum at the end of every inner batch; tokens
      then read the weights from before their batch. None: plain steps.
    restart: "none", or plain gradient descent from the start of the inner
      batch with TTT's coefficients: "rows" takes the gate "step" of each
      token, and ``max(1/r + learned bias_r, 0)`` at the r-th place over the
      key width; "pairs" takes the gate "coef", a number for every pair.
  """

  momentum: bool = False
  muon: MuonClosing | None = None
  restart: Literal["none", "rows", "pairs"] = "none"

  def __post_init__(self):
    _checks.check_choice(restart=(self.restart, ("none", "rows", "pairs")))
    if self.restart != "none" and (self.momentum or self.muon):
      raise ValueError(
        f"`restart` {self.restart!r} works without `momentum` and `muon`."
      )

  @property
  def has_momentum(self) -> bool:
    """Whether the state holds a running sum of steps."""
    return self.momentum or self.muon is not None

  def row_scale(
    self, params: Params, key_dim: int
  ) -> Float[Array, "n inner_batch"] | None:
    """Factors on the steps of a batch, by place; None where there are none."""
    if self.restart != "rows":
      return None
    bias = params["row_bias"].astype(jnp.float32)
    row = jnp.arange(1, bias.shape[-1] + 1, dtype=jnp.float32)[None]
    return jnp.maximum(1 / row + bias, 0) / key_dim


def check_composition(
  architecture: Architecture,
  loss: InnerLoss,
  retention: Retention,
  optimizer: Optimizer,
  *,
  window: int,
) -> None:
  """Raises ValueError where parts of a memory do not go together."""
  for name, part, kind in (
    ("architecture", architecture, Architecture),
    ("loss", loss, InnerLoss),
    ("retention", retention, Retention),
    ("optimizer", optimizer, Optimizer),
  ):
    if not isinstance(part, kind):
      raise ValueError(
        f"`{name}` must be an instance of {kind.__name__}: got {part!r}."
      )
  if optimizer.muon and retention.closing != Closing():
    raise ValueError(
      "`optimizer` with muon needs a `retention` without norm and entropy."
    )
  if optimizer.restart != "none" and (retention.decay or window > 1):
    raise ValueError(
      "`optimizer` with restart needs Retention(decay=False) and window=1: "
      f"got decay={retention.decay}, window={window}."
    )


def default_step_scale(
  architecture: Architecture, loss: InnerLoss, optimizer: Optimizer
) -> float:
  """Largest total step of an inner batch that is known to be stable.

  With keys of unit length: 1 where a norm bounds what the network returns,
  else 1/2, or 1/4 for `Dot`, whose gradient does not shrink as the memory
  learns. A tenth of it with momentum, which adds up ten steps at 0.9. Muon
  makes the size of a step meaningless.

  Args:
    architecture: the network.
    loss: the inner loss.
    optimizer: how steps are taken.
  """
  if optimizer.muon is not None:
    return 1.0
  scale = 0.25 if isinstance(loss, Dot) else 0.5
  scale = 1.0 if architecture.has_norm else scale
  return 0.1 * scale if optimizer.momentum else scale


def gates_of(
  architecture: Architecture,
  loss: InnerLoss,
  retention: Retention,
  optimizer: Optimizer,
  *,
  inner_batch: int,
  window: int,
  step_scale: float | None,
) -> dict[str, Gate]:
  """The numbers of each token that the parts ask for."""
  if optimizer.restart == "pairs":
    return {"coef": Gate("linear", width=inner_batch)}
  scale = step_scale
  if scale is None:
    scale = default_step_scale(architecture, loss, optimizer)
  if optimizer.restart != "rows":
    scale = scale / (inner_batch * window)
  width = window if window > 1 else None
  gates = {"step": Gate("sigmoid", width=width, scale=scale)}
  if retention.decay:
    gates["log_decay"] = Gate("log_decay", scale=DECAY_SCALE)
  if optimizer.momentum:
    gates["momentum"] = Gate("sigmoid")
  for name, largest in loss.gates().items():
    gates[name] = Gate("sigmoid", scale=largest)
  return gates


@dataclass(frozen=True)
class PolynomialFeatures:
  """Monomials of keys and queries, each degree times a learned factor.

  Atlas (arXiv 2505.23735), section 3.1; factors start at 1/degree!, the
  series of exp. The constant is left out.

  Attributes:
    degree: the highest.
    cross: products of different entries, too: k + k (k + 1) / 2 numbers for
      degree 2. False: powers of each entry only.
  """

  degree: int = 2
  cross: bool = False

  def __post_init__(self):
    _checks.check_positive(degree=self.degree)

  def width(self, key_dim: int) -> int:
    """Number of features of a key."""
    degrees = range(1, self.degree + 1)
    if not self.cross:
      return self.degree * key_dim
    return sum(math.comb(key_dim + i - 1, i) for i in degrees)

  def init_params(self, num_heads: int) -> Float[Array, "n degree"]:
    factors = [1 / math.factorial(i) for i in range(1, self.degree + 1)]
    factors = jnp.asarray(factors, jnp.float32)
    return jnp.broadcast_to(factors, (num_heads, self.degree))

  def __call__(
    self, factors: Float[Array, "n degree"], x: Float[Array, "b t n k"]
  ) -> Float[Array, "b t n features"]:
    x32, parts = x.astype(jnp.float32), []
    for i in range(1, self.degree + 1):
      if self.cross:
        index = jnp.asarray(
          list(combinations_with_replacement(range(x.shape[-1]), i))
        )
        monomials = jnp.prod(x32[..., index], axis=-1)
      else:
        monomials = x32**i
      factor = factors[:, i - 1].astype(jnp.float32)
      parts.append(factor[None, None, :, None] * monomials)
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def network_params(params: Params, closing: Closing) -> Params:
  """The initial network out of the learned parameters."""
  others = ("features", "row_bias")
  params = {name: x for name, x in params.items() if name not in others}
  if isinstance(closing, EntropyClosing):
    return closing.positive(params)
  return params
