"""What the MLP memory op is where it is something simpler, and its parts."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from memcache_jax import ops
from memcache_jax.ops import mlp_memory as op
from memcache_jax.testing import assert_close

B, T, N, K = 2, 7, 2, 4


def _normal(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def make():
  rng = np.random.default_rng(0)
  x = {name: _normal(rng, B, T, N, K) for name in "qkv"}
  x["k"] /= jnp.linalg.norm(x["k"], axis=-1, keepdims=True)
  x["step"] = jax.nn.sigmoid(_normal(rng, B, T, N, 1))
  x["log_decay"] = -0.2 * jax.nn.sigmoid(_normal(rng, B, T, N))
  return x


def test_a_matrix_with_the_dot_loss_is_linear_attention():
  x = make()
  params = {"w": jnp.zeros((N, K, K))}

  @jax.jit
  def both(x):
    y, state = op.mlp_memory(
      x["q"],
      x["k"],
      x["v"],
      params,
      architecture=op.MLP.matrix(),
      loss=op.Dot(),
      inner_batch=3,
      step=x["step"],
      log_decay=x["log_decay"],
    )
    want, last = ops.linear_attention(
      x["q"], x["k"], x["v"], log_decay=x["log_decay"], write=x["step"]
    )
    return (y, state.theta["w"]), (want, last.matrix)

  assert_close(*both(x))


def test_a_matrix_with_the_l2_loss_online_is_the_delta_rule():
  """Also as TTT without norm and residual: DeltaNet."""
  x = make()
  params = {"w": _normal(np.random.default_rng(2), N, K, K)}

  @jax.jit
  def three(x):
    run = functools.partial(
      op.mlp_memory,
      x["q"],
      x["k"],
      x["v"],
      params,
      architecture=op.MLP.matrix(),
      loss=op.L2(),
      inner_batch=1,
    )
    step, coef = run(step=x["step"]), run(coef=x["step"])
    want = ops.delta_rule(
      x["q"], x["k"], x["v"], x["step"][..., 0], initial=params["w"]
    )
    return step, coef, want

  step, coef, want = three(x)
  for y, state in (step, coef):
    assert_close((y, state.theta["w"]), want)


LOSSES = {"dot": op.Dot(), "l2": op.L2(), "huber": op.Huber(), "lp": op.Lp()}


def test_output_gradients_are_those_of_the_losses():
  rng = np.random.default_rng(0)
  output, target = _normal(rng, 2, 50, 6)
  gates = {"threshold": jnp.asarray(1 + 3 * rng.random(50), jnp.float32)}

  @jax.jit
  def both(output):
    value = lambda loss: lambda o: jnp.sum(loss.value(o, target, gates))
    return {
      name: (
        loss.gradient(output, target, gates),
        jax.grad(value(loss))(output),
      )
      for name, loss in LOSSES.items()
    }

  for name, (got, want) in both(output).items():
    # The smooth sign is a sign only away from 0.
    far = np.abs(output - target) > (0.5 if name == "lp" else 0.0)
    np.testing.assert_allclose(got[far], want[far], rtol=1e-3, err_msg=name)


def test_orthogonalize_moves_singular_values_near_one():
  x = _normal(np.random.default_rng(0), 2, 16, 64)
  orthogonalize = jax.jit(op.orthogonalize)
  for matrix in (x, np.swapaxes(x, 1, 2)):
    values = np.linalg.svd(orthogonalize(matrix), compute_uv=False)
    assert 0.6 < np.min(values) < np.max(values) < 1.25
  chex.assert_tree_all_finite(orthogonalize(jnp.zeros_like(x)))
