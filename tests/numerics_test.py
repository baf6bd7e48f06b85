"""The arithmetic that must never produce nan."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memcache_jax import numerics

gates = st.one_of(st.floats(0.0, 1.0, width=32), st.just(0.0), st.just(1.0))


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (8,), elements=gates), hnp.arrays(bool, (8,)))
def test_decay_products(decay, resets):
  with np.errstate(divide="ignore"):
    logs, counts = numerics.decay_runs(
      jnp.log(jnp.asarray(decay)), jnp.asarray(resets)
    )
  assert np.all(np.isfinite(logs))
  for first in range(8):
    for last in range(first, 8):
      steps = slice(first + 1, last + 1)
      exact = np.prod(np.where(resets[steps], 0.0, decay[steps]), dtype=float)
      got = 0.0
      if counts[first] == counts[last]:
        got = float(np.exp(logs[last] - logs[first]))
      assert abs(got - exact) <= 1e-4 * exact + 1e-37


def test_masked_exp_has_a_finite_gradient():
  x = jnp.asarray([0.0, 1e4])
  keep = jnp.asarray([True, False])
  value, grad = jax.value_and_grad(
    lambda x: jnp.sum(numerics.masked_exp(x, keep))
  )(x)
  assert value == 1.0
  np.testing.assert_array_equal(grad, [1.0, 0.0])


def test_l2_normalize_at_zero():
  grad = jax.grad(lambda x: jnp.sum(numerics.l2_normalize(x)))(jnp.zeros(4))
  assert np.all(np.isfinite(grad))
  unit = numerics.l2_normalize(jnp.asarray([3.0, 4.0]))
  np.testing.assert_allclose(unit, [0.6, 0.8], rtol=1e-6)


def test_scale_rows_is_a_product():
  x, scale = jnp.arange(6.0).reshape(2, 3), jnp.asarray([2.0, -1.0])
  square = lambda f: jax.value_and_grad(
    lambda *inputs: jnp.sum(f(*inputs) ** 2), argnums=(0, 1)
  )(x, scale)
  got = square(numerics.scale_rows)
  chex.assert_trees_all_close(got, square(lambda x, s: x * s[:, None]))


def test_dot_rows():
  x = jnp.arange(6.0).reshape(2, 3)
  assert numerics.dot_rows(x, x + 1).tolist() == [8.0, 62.0]


def test_rms_norm():
  x = jnp.asarray([[3.0, -3.0, 3.0, -3.0]], jnp.bfloat16)
  y = numerics.rms_norm(x, jnp.full(4, 2.0))
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(y.astype(jnp.float32), jnp.sign(x) * 2.0)
