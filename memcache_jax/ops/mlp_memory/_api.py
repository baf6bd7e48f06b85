"""`mlp_memory`: checks, masking and choice of implementation."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float, Params
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.mlp_memory import (
  _chunked,
  _kernels,
  _reference,
  _validate,
)
from memcache_jax.ops.mlp_memory._architecture import (
  Architecture,
  static_of,
)
from memcache_jax.ops.mlp_memory._closing import Closing
from memcache_jax.ops.mlp_memory._grid import Inputs
from memcache_jax.ops.mlp_memory._loss import InnerLoss
from memcache_jax.ops.mlp_memory._state import (
  MAX_KEPT_BYTES,
  Mix,
  MLPMemoryState,
  init_state,
  make_rule,
)

_NAME = "mlp_memory"


def mlp_memory(
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  params: Params,
  *,
  architecture: Architecture,
  loss: InnerLoss,
  inner_batch: int,
  step: Float[Array, "b t n w"] | None = None,
  coef: Float[Array, "b t n i"] | None = None,
  row_scale: Float[Array, "n i"] | None = None,
  log_decay: Float[Array, "b t n"] | None = None,
  momentum: Float[Array, "b t n"] | None = None,
  loss_gates: Mapping[str, Float[Array, "b t n"]] | None = None,
  closing: Closing | None = None,
  delayed: bool = False,
  max_kept_bytes: int = MAX_KEPT_BYTES,
  mix: Mix | None = None,
  state: MLPMemoryState | None = None,
  mask: Bool[Array, "b t"] | None = None,
  starts: Bool[Array, "b t"] | None = None,
  max_unaligned_starts: int | None = None,
  implementation: _dispatch.Implementation | None = None,
) -> tuple[Float[Array, "b t n v"], MLPMemoryState]:
  r"""A network per head, trained by gradient descent on the tokens it reads.

  .. math::
    S_t = \mu_t S_{t-1} - \sum_{o=0}^{w-1} \eta_{t,o}\,
      \nabla \ell(M_{\theta_*}(k_{t-o}), v_{t-o}), \qquad
    \theta_t = a_t \theta_{t-1} + S_t, \qquad y_t = M_{\theta_t}(q_t)

  where ``theta_*`` are the weights at the start of the inner batch of token
  ``t``: Titans (arXiv 2501.00663), Eq. 13-17, and Memory Caching (arXiv
  2602.24281), Eq. 30-36, with the signs that descend. Inner batches count
  real tokens from the start of the document. With `coef` (or `row_scale`),
  as in TTT (arXiv 2407.04620), the rule is instead
  ``theta_r = theta_* - sum_{j <= r} coef[r, j] grad_j``. With `delayed` tokens
  read what the inner batches before theirs have written:
  ``y_t = M_{\theta_*}(q_t)``.

  The kernel has no gradient of its own: that of the XLA form is taken, with
  that form's forward passes. So None takes it where nothing is differentiated;
  where it could, there is no forward-mode derivative: "xla" has all.

  Args:
    q: queries; float32 or bfloat16, like k and v.
    k: keys.
    v: values.
    params: initial weights and static parameters, as from
      ``architecture.init_params``; leaves [n ...].
    architecture: the network M.
    loss: the inner loss.
    inner_batch: tokens whose gradients are taken at the same weights; it
      defines the model.
    step: entry ``o`` is the step size, at this step, of the token ``o`` steps
      earlier. None only with coef.
    coef: entry ``j``, at place ``r`` of an inner batch, is the coefficient of
      token ``j`` of that batch; those with ``j > r`` do not count.
    row_scale: makes coef of step (w = 1): ``row_scale[r] step_j``.
    log_decay: logarithm of the decay ``a_t``, ``<= 0``; ``-inf`` forgets all.
      None: no decay.
    momentum: ``mu_t`` in [0, 1]. None: no momentum.
    loss_gates: what the loss asks for, by name.
    closing: what happens at the end of an inner batch; None: nothing.
    delayed: whether tokens read ``theta_*`` instead of ``theta_t``.
    max_kept_bytes: of weights and momentum at the starts of inner batches, kept
      for the backward pass; where they are more, some are computed again.
    mix: stored memories to average with the online one, parameter by
      parameter, before reading; None reads the online one.
    state: what an earlier call returned. None: a new sequence.
    mask: False for tokens that do not exist: no write, no decay, no position;
      their y is 0.
    starts: True at the first token of a document, before which everything is
      forgotten; ignored on masked tokens.
    max_unaligned_starts: most starts per row that lie inside an inner batch;
      rows with more become nan. Needed with starts under jax.jit.
    implementation: "reference" (token by token), "xla" (one inner batch at a
      time), "mosaic_tpu" (the same, with weights in a TPU's fast memory),
      "triton" (the same, with weights in a GPU's cache; compiled but not yet
      run on one), or None for the fastest on the platform the program is
      compiled for.

  Returns:
    y, in the dtype of v, and the state after the last token, in float32.

  Raises:
    ValueError: when shapes, dtypes or options do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on second derivatives, where it may run as a kernel: those are for "xla".
    TypeError: by JAX, on derivatives in forward mode there.

  Example:
    >>> import functools
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from memcache_jax.ops.mlp_memory import L2, MLP, mlp_memory
    >>> net = MLP(depth=2)
    >>> params = net.init_params(jax.random.key(0), 1, 8, 8)
    >>> x = jnp.ones((1, 5, 1, 8))
    >>> step = jnp.full((1, 5, 1, 1), 0.1)
    >>> run = functools.partial(
    ...   mlp_memory, architecture=net, loss=L2(), inner_batch=4
    ... )
    >>> y, state = jax.jit(run)(x, x, x, params, step=step)
    >>> y.shape, int(state.position[0])
    ((1, 5, 1, 8), 5)
  """
  closing = Closing() if closing is None else closing
  loss_gates = {} if loss_gates is None else dict(loss_gates)
  _validate.check_options(loss, inner_batch, step, coef, row_scale, loss_gates)
  _checks.check_positive(max_kept_bytes=max_kept_bytes)
  _validate.check_rule(closing, coef, row_scale, log_decay, momentum)
  _validate.check_arrays(
    q,
    k,
    v,
    step,
    coef,
    row_scale,
    log_decay,
    momentum,
    loss_gates,
    mask,
    starts,
    inner_batch,
  )
  _validate.check_params(architecture, params, q, v)
  restart = "none" if coef is None else "pairs"
  rule = make_rule(
    architecture,
    loss,
    closing,
    inner_batch,
    window=1 if step is None else step.shape[-1],
    has_momentum=momentum is not None,
    restart=restart if row_scale is None else "rows",
    delayed=delayed,
    max_kept_bytes=max_kept_bytes,
  )
  tail_gates = loss_gates
  if row_scale is not None and step is not None:
    tail_gates = tail_gates | {"step": step[..., 0]}
    step = None
  inputs = Inputs(
    q,
    k,
    v,
    tail_gates,
    log_decay,
    momentum,
    step,
    coef,
    row_scale,
    None if mix is None else (mix.weights, mix.own),
  )
  if mask is not None:
    # Whatever a masked token holds, even nan, must not reach a product.
    inputs = token_layout.zero_masked(
      inputs._replace(row_scale=None), mask
    )._replace(row_scale=row_scale)
  return _run(
    rule,
    inputs,
    params,
    mix,
    state,
    mask,
    starts,
    max_unaligned_starts,
    implementation,
  )


def _run(
  rule, inputs, params, mix, state, mask, starts, max_unaligned, implementation
):
  why_not = {}
  if implementation not in ("reference", "xla"):
    why_not = _kernels.why_not(rule, inputs, mix, state, mask, starts)
  choice = _dispatch.resolve(_NAME, implementation, why_not)
  inputs = inputs._replace(
    tail_gates={
      name: x.astype(jnp.float32) for name, x in inputs.tail_gates.items()
    }
  )
  initial = init_state(rule, params, inputs.q, inputs.v)
  if state is not None:
    _validate.check_state(state, initial)
  static = static_of(rule.architecture, params)
  memories = None if mix is None else mix.memories
  if memories is not None:
    _validate.check_memories(memories, initial, mix)
  args = (rule, inputs, static, memories, initial, state, mask, starts)
  if choice == "reference":
    return _reference.mlp_memory(*args)
  if choice == "xla":
    return _chunked.mlp_memory(*args, max_unaligned)
  run_all = functools.partial(_kernels.run_blocks, choice)
  return _chunked.mlp_memory(*args, max_unaligned, run_all)
