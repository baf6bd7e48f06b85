"""Caching after training: the same weights, read through a cache."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import post_training
from examples.quickstart.data import Corpus
from examples.quickstart.settings import Settings
from memcache_jax.memories import GatedDelta
from tests.layers.cases import fast_to_compile

pytestmark = pytest.mark.slow

TINY = Settings(
  "tiny",
  steps=2,
  batch_size=2,
  window=8,
  dim=8,
  num_layers=1,
  num_heads=2,
  hidden_dim=8,
)


@pytest.fixture
def small(monkeypatch):
  """A memory that compiles fast, and two variants."""
  monkeypatch.setattr(post_training, "TRAINED", GatedDelta())
  names = ("mean of parameters", "gated, with u = q")
  variants = {name: post_training.VARIANTS[name] for name in names}
  monkeypatch.setattr(post_training, "VARIANTS", variants)


def test_the_cache_adds_no_weights_and_changes_only_later_segments(small):
  config = post_training.config(TINY, post_training.TRAINED)
  trained = post_training.LanguageModel(config, rngs=nnx.Rngs(3))
  ids = jnp.arange(20)[None] % 7
  run = fast_to_compile(lambda model: model(ids)[0])
  expected = run(trained)
  for aggregate in post_training.VARIANTS.values():
    cached = post_training.cached(trained, TINY, aggregate)
    chex.assert_trees_all_equal(nnx.state(cached), nnx.state(trained))
    logits = run(cached)
    np.testing.assert_allclose(logits[:, :8], expected[:, :8], atol=1e-6)
    assert np.all(np.any(logits[:, 8:] != expected[:, 8:], axis=-1))


def test_a_run_measures_every_variant_in_every_bucket(small, capsys):
  text = np.random.default_rng(0).integers(97, 105, 2_000).astype(np.uint8)
  corpus = Corpus(text[:1_000], text[1_000:], "the second half", "tiny")
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    results = post_training.run(replace(TINY, steps=1), corpus, 70, at_most=3)
  assert list(results) == ["no caching", *post_training.VARIANTS]
  bits = np.array(list(results.values()))
  assert bits.shape == (3, 4)
  # One step from uniform over 256 bytes; alike until there is a cache.
  np.testing.assert_allclose(bits, 8, atol=0.5)
  np.testing.assert_allclose(bits[:, 0], bits[0, 0], atol=1e-5)
  assert "32-64" in capsys.readouterr().out


def test_buckets_end_at_the_window_and_its_doubles():
  assert post_training.bucket_ends(512, 8192) == [512, 1024, 2048, 4096, 8192]
  assert post_training.bucket_ends(100, 399) == [100, 200]
  assert post_training.bucket_ends(100, 100) == [100]


def test_wrong_flags_give_one_line(capsys):
  assert post_training.main(["--text", "absent.txt"]) == 2
  assert capsys.readouterr().err.startswith("error: cannot read absent.txt")
  assert post_training.main(["--window", "500000"]) == 2
  assert "bytes are held out" in capsys.readouterr().err
  with pytest.raises(SystemExit):
    post_training.main(["--steps", "0"])
  with pytest.raises(SystemExit):
    post_training.main(["--window", "64", "--longest", "63"])
