import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.models import check_token_ids, next_token_loss

LOGITS = np.random.default_rng(0).normal(size=(2, 5, 7))
TARGETS = np.array([[0, 6, 3, 3, 1], [2, 2, 5, 0, 4]])
MASK = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], bool)


def expected(mask, z_loss=0.0):
  log_z = np.log(np.exp(LOGITS).sum(-1))
  picked = np.take_along_axis(LOGITS, TARGETS[..., None], -1)[..., 0]
  return np.mean((log_z - picked + z_loss * log_z**2)[mask])


def loss(logits=LOGITS, targets=TARGETS, mask=None, **options):
  mask = None if mask is None else jnp.asarray(mask)
  logits = jnp.asarray(logits, jnp.float32)
  return next_token_loss(logits, jnp.asarray(targets), mask, **options)


def test_is_the_mean_of_what_counts():
  everything = np.ones_like(MASK)
  np.testing.assert_allclose(loss(), expected(everything), rtol=1e-5)
  np.testing.assert_allclose(loss(mask=MASK), expected(MASK), rtol=1e-5)
  np.testing.assert_allclose(
    loss(mask=MASK, z_loss=0.1), expected(MASK, 0.1), rtol=1e-5
  )
  assert loss(mask=np.zeros_like(MASK)) == 0


def test_masked_logits_and_targets_may_be_anything():
  logits, targets = LOGITS.copy(), TARGETS.copy()
  logits[~MASK], targets[~MASK] = np.nan, -1
  value, gradient = jax.value_and_grad(
    lambda logits: loss(logits, targets, MASK)
  )(jnp.asarray(logits, jnp.float32))
  np.testing.assert_allclose(value, expected(MASK), rtol=1e-5)
  assert np.all(np.isfinite(gradient))
  assert not np.any(np.asarray(gradient)[~MASK])


@pytest.mark.parametrize("target", [-1, 7, 99])
def test_a_target_out_of_range_is_loud(target):
  targets = TARGETS.copy()
  targets[0, 1] = target
  assert np.isnan(jax.jit(loss)(targets=targets))


def test_bfloat16_logits_are_summed_in_float32():
  logits = jnp.zeros((1, 1, 30_000), jnp.bfloat16)
  value = next_token_loss(logits, jnp.zeros((1, 1), jnp.int32))
  np.testing.assert_allclose(value, np.log(30_000), rtol=1e-5)


def test_check_token_ids():
  check_token_ids(np.array([[0, 15]]), 16)
  check_token_ids(np.array([[0, -1]]), 16, np.array([[True, False]]))
  for wrong in (16, 40, -1):
    with pytest.raises(ValueError, match=rf"0 to 15: got {wrong} at \(1, 0\)"):
      check_token_ids(np.array([[0], [wrong]]), 16)
  with pytest.raises(ValueError, match="`prompts` .* integer .* got float64"):
    check_token_ids(np.array([0.0]), 16, name="prompts")


def test_wrong_arguments(as_a_user):
  logits, targets = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), jnp.int32)

  def check(message, *args):
    with pytest.raises(ValueError, match=message):
      next_token_loss(*args)

  check(r"`targets` must have axes \(b t\)", logits, targets[:, :1])
  check("`mask` must have axes", logits, targets, jnp.ones((1, 3), bool))
  check("`mask` must be boolean", logits, targets, jnp.ones((2, 3)))
  check("`targets` must have an integer", logits, targets.astype(jnp.float32))
  check("`targets` must be an array", logits, [[0, 1, 2], [0, 1, 2]])
  check("`logits` must have at least one row", logits[:0], targets[:0])
