"""Named deep memories: `Miras` with other defaults."""

from dataclasses import dataclass

from memcache_jax.memories._miras import Miras
from memcache_jax.memories._miras_parts import (
  Optimizer,
  PolynomialFeatures,
  Retention,
)
from memcache_jax.ops.mlp_memory import (
  MLP,
  Architecture,
  Dot,
  GatedMLP,
  Huber,
  InnerLoss,
  Lp,
  MuonClosing,
)


@dataclass(frozen=True)
class DeepLinear(Miras):
  r"""DLA: linear attention with a network instead of a matrix.

  .. math::
    \theta_t = a_t \theta_{t-1} - \eta_t \nabla (-\langle M(k_t), v_t \rangle)

  Memory Caching (arXiv 2602.24281), Eq. 30-33, with the sign that descends;
  it has no decay, as in the paper, unless asked for.

  Example:
    >>> from memcache_jax.memories import DeepLinear
    >>> sorted(DeepLinear().gates())
    ['step']
  """

  loss: InnerLoss = Dot()
  retention: Retention = Retention(decay=False)


@dataclass(frozen=True)
class DeepSlidingWindow(Miras):
  """DLA with decay whose tokens are written again by the following steps.

  Memory Caching (arXiv 2602.24281), Eq. 26 with a network as the memory.

  Example:
    >>> from memcache_jax.memories import DeepSlidingWindow
    >>> DeepSlidingWindow().gates()["step"].width
    2
  """

  loss: InnerLoss = Dot()
  window: int = 2


@dataclass(frozen=True)
class Titans(Miras):
  r"""Titans' long-term memory (LMM): gradient descent, momentum, decay.

  .. math::
    S_t = \mu_t S_{t-1} - \eta_t \nabla \tfrac12 |M(k_t) - v_t|^2, \qquad
    \theta_t = a_t \theta_{t-1} + S_t

  Titans (arXiv 2501.00663), Eq. 13-16; Memory Caching (arXiv 2602.24281),
  Eq. 34-36, prints it with the signs that ascend.

  Example:
    >>> from memcache_jax.memories import Titans
    >>> sorted(Titans(inner_batch=64).gates())
    ['log_decay', 'momentum', 'step']
  """

  optimizer: Optimizer = Optimizer(momentum=True)


@dataclass(frozen=True)
class TTTLinear(Miras):
  r"""TTT-Linear: ``f(x) = x + LN(x W + b)``, trained batch by batch.

  .. math:: W_r = W_0 - \sum_{j \le r} c_{r,j} \nabla_j

  with W_0 from the start of the inner batch and ``c_{r,j} = max(1/r + bias_r,
  0) step_j / k``: TTT (arXiv 2407.04620), in its code's form.

  Example:
    >>> from memcache_jax.memories import TTTLinear
    >>> TTTLinear().gates()["step"].scale
    1.0
  """

  architecture: Architecture = MLP.ttt_linear()
  retention: Retention = Retention(decay=False)
  optimizer: Optimizer = Optimizer(restart="rows")
  init_std: float | None = 0.02


@dataclass(frozen=True)
class TTTMLP(TTTLinear):
  """TTT-MLP: as `TTTLinear`, with a network of two maps and smaller steps.

  Example:
    >>> from memcache_jax.memories import TTTMLP
    >>> TTTMLP().architecture.depth
    2
  """

  architecture: Architecture = MLP.ttt_mlp()
  step_scale: float | None = 0.1


@dataclass(frozen=True)
class Yaad(Miras):
  """Yaad: robust to outliers, by a loss that grows slowly for large errors.

  Miras (arXiv 2504.13173), section 5; the threshold is a gate.

  Example:
    >>> from memcache_jax.memories import Yaad
    >>> sorted(Yaad().gates())
    ['log_decay', 'step', 'threshold']
  """

  loss: InnerLoss = Huber()


@dataclass(frozen=True)
class Moneta(Miras):
  """Moneta: an l_p loss, and weights kept by an l_q norm.

  Miras (arXiv 2504.13173), section 5, with its p = 3 and q = 4.

  Example:
    >>> from memcache_jax.memories import Moneta
    >>> Moneta().retention.norm
    4.0
  """

  loss: InnerLoss = Lp()
  retention: Retention = Retention(norm=4.0)


@dataclass(frozen=True)
class Memora(Miras):
  """Memora: positive weights of constant sum, updated in their logarithms.

  Miras (arXiv 2504.13173), section 5: KL and entropy retention. The exact
  step is taken once per inner batch; in between, tokens read the linear one.

  Example:
    >>> from memcache_jax.memories import Memora
    >>> Memora().retention.entropy
    True
  """

  retention: Retention = Retention(entropy=True)
  init_std: float | None = 0.02


@dataclass(frozen=True)
class Omega(Miras):
  """The Omega rule with momentum: Atlas without Muon, exact at every token.

  Atlas (arXiv 2505.23735), Eq. 9 (OmegaNet): every step also takes the
  gradients of the window's earlier tokens.

  Example:
    >>> from memcache_jax.memories import Omega
    >>> Omega(window=4).gates()["step"].width
    4
  """

  optimizer: Optimizer = Optimizer(momentum=True)
  window: int = 2


@dataclass(frozen=True)
class Atlas(Miras):
  """Atlas, chunk-wise: the Omega rule, polynomial keys, and Muon.

  Atlas (arXiv 2505.23735), with one orthogonalisation per inner batch, of the
  momentum at its end; tokens read the decayed weights from before their
  batch. The paper has one per token, which needs every token's matrices.

  Example:
    >>> from memcache_jax.memories import Atlas
    >>> Atlas().features.degree
    2
  """

  architecture: Architecture = MLP(residual=False)
  optimizer: Optimizer = Optimizer(momentum=True, muon=MuonClosing())
  window: int = 2
  features: PolynomialFeatures | None = PolynomialFeatures()


@dataclass(frozen=True)
class LaCT(Miras):
  """LaCT: large batches, one orthogonal update each, a gated network.

  LaCT (arXiv 2505.23884), without its momentum: gradients of the batch are
  summed, orthogonalised and subtracted, and columns of the weights keep their
  norms. Tokens read the weights from before their batch, so that attention
  over a window as long as the batch belongs beside it.

  Example:
    >>> from memcache_jax.memories import LaCT
    >>> LaCT(inner_batch=512).loss
    Dot()
  """

  architecture: Architecture = GatedMLP()
  loss: InnerLoss = Dot()
  retention: Retention = Retention(decay=False)
  optimizer: Optimizer = Optimizer(
    muon=MuonClosing(step=1.0, renormalize=True, reset=True)
  )
  inner_batch: int = 2048
