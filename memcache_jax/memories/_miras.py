"""Memories composed of four answers: the view of Miras.

Miras (arXiv 2504.13173) describes a memory by its architecture, by its
attentional bias (what it minimises at each token), by its retention (what it
keeps of the past) and by its inner optimiser. `Miras` is that composition;
the named models in `_deep.py` are `Miras` with other defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from memcache_jax.array_typing import (
  Array,
  Float,
  Gates,
  Int,
  Params,
  PRNGKeyArray,
  State,
)
from memcache_jax.memories._base import (
  Gate,
  HeadShape,
  Memory,
  Tokens,
  check_tokens,
)
from memcache_jax.memories._miras_parts import (
  Optimizer,
  PolynomialFeatures,
  Retention,
  check_composition,
  gates_of,
  network_params,
)
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops._dispatch import Implementation, of_op
from memcache_jax.ops.mlp_memory import (
  L2,
  MLP,
  Architecture,
  Closing,
  InnerLoss,
  Mix,
  MLPMemoryState,
  apply_architecture,
  init_state,
  make_rule,
  mlp_memory,
  read_networks,
  read_selected_networks,
)


@dataclass(frozen=True)
class Miras(Memory):
  r"""A network that is trained, by gradient descent, on what it reads.

  .. math::
    S_t = \mu_t S_{t-1} - \sum_{o=0}^{w-1} \eta_{t,o}
      \nabla \ell(M_{\theta_*}(k_{t-o}), v_{t-o}), \qquad
    \theta_t = a_t \theta_{t-1} + S_t, \qquad y_t = M_{\theta_t}(q_t)

  The inner gradients of all tokens of an inner batch are taken at the same
  weights theta_*, those at its start. Initial weights are learned; they must
  not be zero in a deep memory, which could then never move.

  Attributes:
    architecture: the network M.
    loss: the inner loss l, the attentional bias.
    retention: what is kept.
    optimizer: how steps are taken.
    inner_batch: tokens whose gradients are taken at the same weights. It
      defines the model; 1 is the exact online rule. A multiple of 16 or 32 is
      fastest; a large prime is slow.
    window: tokens written at each step (the Omega rule).
    delayed: tokens read ``M_{theta_*}``, as in titans-pytorch: less work in
      long batches, beside which attention over a window as long belongs.
    step_scale: largest total step of an inner batch: the gate "step" is in
      (0, step_scale / (inner_batch window)). None: `default_step_scale`.
    init_std: of the initial weights; None for 1/sqrt(fan in).
    max_kept_bytes: of weights that a training step keeps for its backward pass,
      per call; with more of them, less is computed again. 64 MiB by default.
    features: maps keys and queries before the network sees them.
    implementation: of its ops: "reference", "xla", a kernel for its reads of
      cached networks, or None for the fastest. Where kernels may run there is
      a first derivative only, in reverse; "xla" has all.

  Example:
    >>> from memcache_jax.memories import Miras, Optimizer, Retention
    >>> from memcache_jax.ops.mlp_memory import Huber, MLP
    >>> memory = Miras(
    ...   MLP(depth=3), Huber(), Retention(norm=4.0), Optimizer(momentum=True)
    ... )
    >>> sorted(memory.gates())
    ['log_decay', 'momentum', 'step', 'threshold']
  """

  architecture: Architecture = MLP()
  loss: InnerLoss = L2()
  retention: Retention = Retention()
  optimizer: Optimizer = Optimizer()
  inner_batch: int = 16
  window: int = 1
  delayed: bool = False
  step_scale: float | None = None
  init_std: float | None = None
  max_kept_bytes: int = 2**26
  features: PolynomialFeatures | None = None
  implementation: Implementation | None = None

  def __post_init__(self):
    _checks.check_positive(inner_batch=self.inner_batch, window=self.window)
    _checks.check_positive(max_kept_bytes=self.max_kept_bytes)
    _checks.check_choice(delayed=(self.delayed, (False, True)))
    _dispatch.check_name(self.implementation)
    for name in ("step_scale", "init_std"):
      value = getattr(self, name)
      if value is not None:
        _checks.check_number(low=0, open_low=True, **{name: value})
    check_composition(
      *(self.architecture, self.loss, self.retention, self.optimizer),
      window=self.window,
    )

  @property
  def _closing(self) -> Closing:
    return self.optimizer.muon or self.retention.closing

  @property
  def closes_after_reading(self) -> bool:
    return self.delayed or type(self._closing) is not Closing

  def gates(self) -> Mapping[str, Gate]:
    return gates_of(
      *(self.architecture, self.loss, self.retention, self.optimizer),
      inner_batch=self.inner_batch,
      window=self.window,
      step_scale=self.step_scale,
    )

  def init_params(self, key: PRNGKeyArray, shape: HeadShape) -> Params:
    n, k, v = self._network_shape(shape)
    params = self.architecture.init_params(key, n, k, v, self.init_std)
    if self.features is not None:
      params["features"] = self.features.init_params(n)
    if self.optimizer.restart == "rows":
      params["row_bias"] = jnp.zeros((n, self.inner_batch), jnp.float32)
    return params

  def init_state(
    self,
    params: Params,
    shape: HeadShape,
    batch: int,
    *,
    max_length: int | None = None,
  ) -> MLPMemoryState:
    del max_length
    n, k, v = self._network_shape(shape)
    rule = make_rule(
      self.architecture,
      self.loss,
      self._closing,
      self.inner_batch,
      window=self.window,
      has_momentum=self.optimizer.has_momentum,
      restart=self.optimizer.restart,
    )
    k, v = (jnp.zeros((batch, 0, n, i), jnp.float32) for i in (k, v))
    return init_state(rule, network_params(params, self._closing), k, v)

  def step(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> MLPMemoryState:
    gates = {name: gate[:, None] for name, gate in gates.items()}
    k, v = k[:, None], v[:, None]
    return self.scan(params, state, Tokens(k, k, v, gates))[1]

  def snapshot(self, state: State) -> Params:
    """The weights that the next token starts from; see the base class."""
    return self._closing.as_read(state.start, state.theta)

  def inner_loss(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> Float[Array, "b n"]:
    """The loss at the start of the inner batch; see the base class."""
    weights = self._closing.as_read(state.start, state.start)
    y = self.read(params, weights, k[:, None].astype(jnp.float32))[:, 0]
    gates = {name: gates[name] for name in self.loss.gates()}
    return self.loss.value(y, v.astype(jnp.float32), gates)

  def read(
    self, params: Params, memory: State, q: Float[Array, "b t n k"]
  ) -> Float[Array, "b t n v"]:
    q = self._map(params, q)
    return apply_architecture(self.architecture, params, memory, q)

  def read_many(
    self,
    params: Params,
    memories: State,
    q: Float[Array, "b t n k"],
    weights: Float[Array, "b t n s"],
  ) -> Float[Array, "b t n v"]:
    return read_networks(
      *(self.architecture, params, memories, self._map(params, q), weights),
      implementation=of_op(self.implementation, "mosaic_tpu", "triton"),
    )

  def read_selected(
    self,
    params: Params,
    memories: State,
    q: Float[Array, "b t n k"],
    index: Int[Array, "b t n r"],
    weights: Float[Array, "b t n r"],
    in_tiles: Callable[..., Float[Array, "b t n v"]],
  ) -> Float[Array, "b t n v"]:
    return read_selected_networks(
      *(self.architecture, params, memories, self._map(params, q)),
      *(index, weights),
      xla=in_tiles,
      implementation=of_op(self.implementation, "mosaic_tpu", "triton"),
    )

  def scan(
    self, params: Params, state: State | None, tokens: Tokens
  ) -> tuple[Float[Array, "b t n v"], MLPMemoryState]:
    return self._scan(params, state, tokens, None)

  def _scan(self, params, state, tokens, mix):
    check_tokens(self, tokens)
    gates = tokens.gates
    step = gates.get("step")
    if step is not None and step.ndim == 3:
      step = step[..., None]
    momentum = gates.get("momentum")
    if momentum is None and self.optimizer.has_momentum:
      momentum = jnp.ones(tokens.q.shape[:3], jnp.float32)
    return mlp_memory(
      self._map(params, tokens.q),
      self._map(params, tokens.k),
      tokens.v,
      network_params(params, self._closing),
      architecture=self.architecture,
      loss=self.loss,
      inner_batch=self.inner_batch,
      step=step,
      coef=gates.get("coef"),
      row_scale=self.optimizer.row_scale(params, tokens.k.shape[-1]),
      log_decay=gates.get("log_decay"),
      momentum=momentum,
      loss_gates={name: gates[name] for name in self.loss.gates()},
      closing=self._closing,
      delayed=self.delayed,
      max_kept_bytes=self.max_kept_bytes,
      mix=mix,
      state=state,
      mask=tokens.mask,
      starts=tokens.starts,
      max_unaligned_starts=tokens.max_unaligned_starts,
      implementation=of_op(self.implementation),
    )

  def scan_soup(
    self,
    params: Params,
    state: State | None,
    tokens: Tokens,
    memories: State,
    weights: Float[Array, "b t n s"],
    own_weight: Float[Array, "b t n"],
  ) -> tuple[Float[Array, "b t n v"], MLPMemoryState]:
    """See `Memory.scan_soup`; mixes map by map, never a token's parameters."""
    return self._scan(params, state, tokens, Mix(memories, weights, own_weight))

  def _network_shape(self, shape: HeadShape) -> HeadShape:
    if self.features is None:
      return shape
    return shape._replace(key_dim=self.features.width(shape.key_dim))

  def _map(self, params, x):
    return x if self.features is None else self.features(params["features"], x)
