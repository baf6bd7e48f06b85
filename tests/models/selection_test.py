"""Selections in a model: noise by layer, and reports in one pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import (
  Cached,
  Constant,
  GumbelTopK,
  SparseSelective,
  StraightThrough,
)
from memcache_jax.memories import Linear
from memcache_jax.models import (
  LanguageModel,
  MemorySpec,
  ModelConfig,
  selection_reports,
)
from memcache_jax.testing import assert_close

pytestmark = pytest.mark.slow


def _model(selection):
  memory = Cached(
    Linear(), Constant(4), SparseSelective(1, selection=selection)
  )
  pattern = (MemorySpec(memory, 2), MemorySpec(Linear(), 2))
  config = ModelConfig.tiny(*pattern, repeats=2)
  return LanguageModel(config, rngs=nnx.Rngs(0))


TEXT = jnp.arange(40)[None] * 7 % 256


def test_noise_is_drawn_with_rngs_only():
  model = _model(GumbelTopK())

  @jax.jit
  def run(model, key):
    drawn = model(TEXT, rngs=nnx.Rngs(router=key))[0]
    logits, reports = selection_reports(model, TEXT, rngs=nnx.Rngs(router=key))
    return drawn, model(TEXT)[0], logits, reports

  first, quiet, logits, reports = run(model, jax.random.key(0))
  again = run(model, jax.random.key(0))
  other = run(model, jax.random.key(1))
  np.testing.assert_array_equal(first, again[0])
  np.testing.assert_array_equal(quiet, other[1])
  assert_close(logits, first)
  for pair in ((first, quiet), (first, other[0]), (logits, quiet)):
    assert not np.allclose(*pair, atol=1e-6)
  # Alike at the start, and so the noise decides: layers have their own.
  assert reports.keys() == {0, 2}
  assert np.any(reports[0].share != reports[2].share)
  plain = _model(StraightThrough())
  nnx.update(plain, nnx.state(model))
  assert_close(jax.jit(lambda model: model(TEXT)[0])(plain), quiet)


def test_a_loss_of_logits_and_balance():
  graph, params = nnx.split(_model(StraightThrough()))

  @jax.jit
  def run(params):
    def balance(params):
      logits, reports = selection_reports(nnx.merge(graph, params), TEXT)
      return sum(x.balance for x in reports.values()), logits

    gradient, logits = jax.grad(balance, has_aux=True)(params)
    return gradient, logits, nnx.merge(graph, params)(TEXT)[0]

  gradient, logits, want = run(params)
  assert_close(logits, want)
  router = gradient["blocks"][0]["mixer"]["gates"]["projections"]["u"]
  assert np.all(np.any(router["kernel"][...], axis=(1, 2, 3)))


@pytest.mark.usefixtures("as_a_user")
def test_wrong_rngs():
  with pytest.raises(ValueError, match="`rngs` must be an nnx.Rngs"):
    selection_reports(_model(GumbelTopK()), TEXT, rngs=jax.random.key(0))
  with pytest.raises(ValueError, match="`rngs` must have a stream 'router'"):
    _model(GumbelTopK())(TEXT, rngs=nnx.Rngs(params=0))
