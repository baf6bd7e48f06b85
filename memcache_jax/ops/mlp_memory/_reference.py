"""The definition of an MLP memory: one token at a time, in float32.

Every token has weights of its own here, and gradients are gradients of the
weights.
"""

import jax
import jax.numpy as jnp

from memcache_jax import token_layout
from memcache_jax.array_typing import Array, Bool, Float, Params
from memcache_jax.ops.mlp_memory._architecture import apply_affine
from memcache_jax.ops.mlp_memory._grid import Inputs
from memcache_jax.ops.mlp_memory._state import MLPMemoryState, Rule, Tail


def mlp_memory(
  rule: Rule,
  inputs: Inputs,
  static: Params,
  memories: Params | None,
  initial: MLPMemoryState,
  state: MLPMemoryState | None,
  mask: Bool[Array, "b t"] | None,
  starts: Bool[Array, "b t"] | None,
) -> tuple[Float[Array, "b t n v"], MLPMemoryState]:
  """`mlp_memory` as a scan over tokens; masked tokens come in as zeros."""
  b, t = inputs.q.shape[:2]
  mask = jnp.ones((b, t), bool) if mask is None else mask
  starts = jnp.zeros((b, t), bool) if starts is None else starts
  row_scale = inputs.row_scale

  def token(state, x):
    x, keep, begins = x
    state = token_layout.select_rows(begins & keep, initial, state)
    new, weights = _write(rule, static, state, x, row_scale)
    if memories is not None:
      weights = _mix(memories, weights, x.mix)
    y = _forward(rule, static, weights, x.q)
    y = jnp.where(keep[:, None, None], y, 0.0)
    return token_layout.select_rows(keep, new, state), y

  tokens = inputs._replace(row_scale=None)
  tokens = jax.tree.map(
    lambda x: jnp.moveaxis(x.astype(jnp.float32), 1, 0), tokens
  )
  first = initial if state is None else state
  last, y = jax.lax.scan(token, first, (tokens, mask.T, starts.T))
  return jnp.moveaxis(y, 0, 1).astype(inputs.v.dtype), last


def _write(rule, static, state, x, row_scale):
  """The state after one token, and the weights that this token reads."""
  kept = Tail(x.k[:, None], x.v[:, None], _add_axis(x.tail_gates))
  if state.tail is not None:
    kept = jax.tree.map(
      lambda a, b: jnp.concatenate([a, b], axis=1), state.tail, kept
    )
  scale = rule.closing.scale(state.start)
  weights = _scaled(scale, state.start)
  gradients = jax.vmap(
    lambda token: _gradient(rule, static, weights, token), in_axes=1, out_axes=2
  )(kept)  # leaves [b n e ...], oldest first
  total = lambda c: jax.tree.map(
    lambda g: jnp.einsum("bne,bne...->bn...", c, g, precision="highest"),
    gradients,
  )
  place = state.position % rule.inner_batch
  decay = 1.0 if x.log_decay is None else jnp.exp(x.log_decay)
  momentum = state.momentum
  if rule.pairwise:
    coef = _pair_coefficients(rule, x, kept, row_scale, place)
    theta = jax.tree.map(jnp.subtract, state.start, total(coef))
  else:
    step = _step_weights(x.step, state.position)
    update = jax.tree.map(jnp.negative, total(step))
    if rule.has_momentum:
      update = jax.tree.map(
        lambda m, u: _outer(x.momentum, m) * m + u, momentum, update
      )
      momentum = update
    theta = jax.tree.map(lambda w: _outer(decay, w) * w, state.theta)
    if rule.closing.reads_own_batch:
      theta = jax.tree.map(jnp.add, theta, update)
  total_decay = None if state.decay is None else state.decay * decay
  full = place == rule.inner_batch - 1
  closed = rule.closing.close(state.start, theta, momentum, total_decay)
  after = token_layout.select_rows(full, closed, (theta, momentum))
  if total_decay is not None:
    total_decay = jnp.where(full[:, None], 1.0, total_decay)
  tail = state.tail
  if tail is not None:
    tail = jax.tree.map(lambda x: x[:, 1:], kept)
  new = MLPMemoryState(
    theta=after[0],
    start=token_layout.select_rows(full, after[0], state.start),
    momentum=after[1],
    decay=total_decay,
    tail=tail,
    position=state.position + 1,
  )
  return new, weights if rule.delayed else _scaled(scale, theta)


def _gradient(rule, static, weights, token):
  """Gradient of the inner loss of one token; leaves [b n ...]."""
  forward = lambda w: _forward(rule, static, w, token.k)
  output, pull = jax.vjp(forward, weights)
  return pull(rule.loss.gradient(output, token.v, token.gates))[0]


def _forward(rule, static, weights, x):
  """Reads one token [b n k]."""
  affine = lambda name, z: apply_affine(
    weights, name, z, jnp.dtype(jnp.float32)
  )
  return rule.architecture.forward(affine, static, x[:, :, None])[:, :, 0]


def _step_weights(step, position):
  """Weights of the window's tokens, oldest first; none before a document."""
  offset = jnp.arange(step.shape[-1])[None, None]
  step = jnp.where(offset <= position[:, None, None], step, 0.0)
  return step[..., ::-1]


def _pair_coefficients(rule, x, kept, row_scale, place):
  """Coefficient of each kept token: place - distance in the inner batch."""
  column = place[:, None] + jnp.arange(1 - rule.inner_batch, 1)[None]
  if x.coef is None:
    scale = row_scale.T[place]
    coef = scale[..., None] * jnp.moveaxis(kept.gates["step"], 1, 2)
  else:
    coef = jax.vmap(lambda c, i: c[:, i])(x.coef, jnp.maximum(column, 0))
  return jnp.where((column >= 0)[:, None], coef, 0.0)


def _mix(memories, weights, mix):
  stored, own = mix

  def one(memory, weight):
    mixed = jnp.einsum("bns,bsn...->bn...", stored, memory)
    return mixed + _outer(own, weight) * weight

  return {name: one(memories[name], w) for name, w in weights.items()}


def _scaled(scale, theta):
  if scale is None:
    return theta
  return {name: _outer(scale[name], w) * w for name, w in theta.items()}


def _add_axis(tree):
  return jax.tree.map(lambda x: x[:, None], tree)


def _outer(scalar, like):
  if isinstance(scalar, float):
    return scalar
  return scalar.reshape(scalar.shape + (1,) * (like.ndim - scalar.ndim))
