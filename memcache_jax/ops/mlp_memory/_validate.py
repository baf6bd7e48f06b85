"""Argument checks of `mlp_memory`."""

import jax

from memcache_jax.ops import _checks
from memcache_jax.ops.mlp_memory._architecture import bias_name


def check_options(loss, inner_batch, step, coef, row_scale, loss_gates):
  _checks.check_positive(inner_batch=inner_batch)
  if (step is None) == (coef is None):
    raise ValueError(
      "exactly one of `step` and `coef` must be given: got "
      f"{'neither' if step is None else 'both'}."
    )
  if row_scale is not None and (step is None or step.shape[-1] != 1):
    raise ValueError("`row_scale` needs `step` with a last axis of size 1.")
  if set(loss_gates) != set(loss.gates()):
    raise ValueError(
      f"`loss_gates` must be {sorted(loss.gates())}, as {loss} asks: "
      f"got {sorted(loss_gates)}."
    )


def check_rule(closing, coef, row_scale, log_decay, momentum):
  if coef is not None or row_scale is not None:
    if log_decay is not None or momentum is not None:
      raise ValueError(
        "`coef` and `row_scale` count from the start of the inner batch: "
        "`log_decay` and `momentum` must be None."
      )
    if not closing.reads_own_batch:
      raise ValueError(f"`closing` {closing} works with `step` only.")
  if not closing.reads_own_batch and momentum is None:
    raise ValueError(f"`closing` {closing} needs `momentum`: got None.")


def check_arrays(
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
):
  gates = {f"loss_gates[{name!r}]": x for name, x in loss_gates.items()}
  _checks.check_shapes(
    {
      "q": (q, "b t n k"),
      "k": (k, "b t n k"),
      "v": (v, "b t n v"),
      "step": (step, "b t n w"),
      "coef": (coef, f"b t n {inner_batch}"),
      "row_scale": (row_scale, f"n {inner_batch}"),
      "log_decay": (log_decay, "b t n"),
      "momentum": (momentum, "b t n"),
      "mask": (mask, "b t"),
      "starts": (starts, "b t"),
    }
    | {name: (x, "b t n") for name, x in gates.items()}
  )
  _checks.check_floating(
    q=q,
    k=k,
    v=v,
    step=step,
    coef=coef,
    row_scale=row_scale,
    log_decay=log_decay,
    momentum=momentum,
    **gates,
  )
  _checks.check_same_dtype(q=q, k=k, v=v)
  _checks.check_bool(mask=mask, starts=starts)


def check_params(architecture, params, q, v):
  n, key_dim, value_dim = *q.shape[2:], v.shape[-1]
  expected = {
    name: x.shape
    for name, x in jax.eval_shape(
      lambda: architecture.static_params(n, value_dim)
    ).items()
  }
  for name, size in architecture.affine_maps(key_dim, value_dim).items():
    expected[name] = (n, size.in_dim, size.out_dim)
    if size.bias:
      expected[bias_name(name)] = (n, size.out_dim)
  got = {name: x.shape for name, x in params.items()}
  if got != expected:
    raise ValueError(
      f"`params` must have the shapes {expected} of {architecture}: got {got}."
    )


def check_state(state, initial):
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  if jax.tree.structure(state) != jax.tree.structure(initial) or shapes(
    state
  ) != shapes(initial):
    raise ValueError(
      "`state` must come from a call with the same options and sizes: "
      f"expected {shapes(initial)}, got {shapes(state)}."
    )


def check_memories(memories, initial, mix):
  slots = mix.weights.shape[-1]
  expected = {
    name: (x.shape[0], slots, *x.shape[1:]) for name, x in initial.theta.items()
  }
  got = {name: x.shape for name, x in memories.items()}
  if got != expected:
    raise ValueError(
      f"`mix.memories` must have the shapes {expected}: got {got}."
    )
