"""MQAR and selective copying: what is asked, where, and how often."""

import chex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcache_jax.tasks import (
  MQAR,
  SelectiveCopy,
  Task,
  exact_match,
  token_accuracy,
)
from tests.tasks.readers import recall

ZOOLOGY = MQAR(length=256, num_pairs=16)


def generator(seed: int = 0) -> np.random.Generator:
  return np.random.default_rng(seed)


@pytest.mark.parametrize("task", [ZOOLOGY, SelectiveCopy(length=64)])
def test_equal_seeds_give_equal_batches(task):
  assert isinstance(task, Task)
  first, again, other = (task.batch(generator(s), 4) for s in (1, 1, 2))
  chex.assert_trees_all_equal(first, again)
  assert (first.tokens != other.tokens).any()
  chex.assert_shape(list(first), (4, task.length))
  chex.assert_type(list(first), [np.int32, np.int32, bool, bool])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_mqar_is_as_defined_for_any_sizes(data):
  length = 2 * data.draw(st.integers(2, 40))
  pairs = data.draw(st.integers(1, length // 4))
  vocab_size = length + data.draw(st.integers(1, 50))
  blank = data.draw(st.booleans())
  task = MQAR(
    length=length,
    num_pairs=pairs,
    vocab_size=vocab_size,
    random_fillers=not blank,
  )
  batch = task.batch(generator(data.draw(st.integers(0, 9))), 3)
  half = vocab_size // 2
  for tokens, targets, asked in zip(*batch[:3], strict=True):
    keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
    assert len(set(keys)) == len(set(values)) == pairs
    assert keys.min() >= 1
    assert keys.max() < half
    assert values.min() >= half
    assert values.max() < vocab_size
    places = np.flatnonzero(asked)
    # Each key once, in the first token of a slot, with its value as target.
    assert sorted(tokens[places]) == sorted(keys)
    assert (places >= 2 * pairs).all()
    assert (places % 2 == 0).all()
    value_of = dict(zip(keys, values, strict=True))
    assert [value_of[k] for k in tokens[places]] == list(targets[places])
    assert not targets[~asked].any()
    if blank:
      rest = np.delete(tokens, places)[2 * pairs :]
      assert not rest.any()
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
  assert batch.mask.all()


def test_mqar_asks_soon_more_often_by_the_power_law():
  rows, slots = 5000, np.arange(1, 113)
  task = MQAR(length=256, num_pairs=16, vocab_size=260)
  batch = task.batch(generator(), rows)
  share = batch.answer_mask[:, 32::2].mean(axis=0)
  # One slot drawn after another, as the original does.
  weights = slots**-0.99 / np.sum(slots**-0.99)
  rng = np.random.RandomState(1)  # noqa: NPY002
  drawn = [rng.choice(112, 16, False, weights) for _ in range(rows)]
  expected = np.bincount(np.concatenate(drawn), minlength=112) / rows
  sigma = np.sqrt(2 * expected * (1 - expected) / rows)
  assert np.abs((share - expected) / sigma).max() < 4
  assert share[0] > 0.97
  assert share[-1] < 0.06
  # The first key is the first drawn, so it tends to come back sooner.
  first, last = (
    np.argmax(batch.tokens[:, 32:] == batch.tokens[:, [k]], axis=1).mean()
    for k in (0, 30)
  )
  assert first < 0.7 * last


def test_mqar_power_one_is_uniform():
  task = MQAR(length=64, num_pairs=4, vocab_size=65, power=1)
  share = task.batch(generator(), 4000).answer_mask[:, 8::2].mean(axis=0)
  np.testing.assert_allclose(share, 4 / 28, atol=0.025)


def test_mqar_fillers_are_uniform_over_all_ids():
  task = MQAR(length=64, num_pairs=1, vocab_size=65)
  tokens = task.batch(generator(), 2000).tokens[:, 3::2]  # never a question
  share = np.bincount(tokens.reshape(-1), minlength=65) / tokens.size
  np.testing.assert_allclose(share, 1 / 65, atol=0.003)


def test_who_reads_all_is_right_and_who_reads_the_end_is_at_chance():
  batch = ZOOLOGY.batch(generator(), 200)
  assert token_accuracy(recall(batch), batch) == 1.0
  assert exact_match(recall(batch), batch) == 1.0
  assert token_accuracy(recall(batch, start=192), batch) < 0.01
  # Guessing among the values of the row is right one time in sixteen.
  values = batch.tokens[:, 1:32:2]
  guess = values[:, generator(1).integers(16, size=256)]
  assert token_accuracy(guess, batch) == pytest.approx(1 / 16, abs=0.02)
  assert exact_match(guess, batch) == 0.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.integers(3, 9))
def test_selective_copy_is_as_defined(copied, noise, vocab_size):
  task = SelectiveCopy(
    length=2 * copied + noise, num_copied=copied, vocab_size=vocab_size
  )
  batch = task.batch(generator(), 3)
  context = task.length - copied
  for tokens, targets, asked in zip(*batch[:3], strict=True):
    data = tokens[:context][tokens[:context] > 0]
    assert len(data) == copied
    assert data.max() < vocab_size - 1
    assert (tokens[context:] == vocab_size - 1).all()
    np.testing.assert_array_equal(targets[asked], data)
    np.testing.assert_array_equal(np.flatnonzero(asked) >= context, True)


def test_selective_copy_spreads_its_tokens_evenly():
  task = SelectiveCopy(length=40, num_copied=8)
  tokens = task.batch(generator(), 3000).tokens[:, :32]
  np.testing.assert_allclose((tokens > 0).mean(axis=0), 0.25, atol=0.03)
  assert set(np.unique(tokens)) == set(range(15))


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: MQAR(length=65, num_pairs=4), "`length` must be even: got 65"),
    (lambda: MQAR(length=64, num_pairs=17), "a quarter of length=64: got 17"),
    (lambda: MQAR(length=64, num_pairs=4, vocab_size=64), "above length=64"),
    (lambda: MQAR(length=64, num_pairs=0), "`num_pairs` .* at least 1: got 0"),
    (lambda: MQAR(length=64, num_pairs=4, power=-1), "`power`"),
    (lambda: MQAR(length=6.0, num_pairs=1), "`length` must be an integer"),
    (lambda: SelectiveCopy(length=31), "`length` .* at least 32: got 31"),
    (lambda: SelectiveCopy(vocab_size=2), "`vocab_size` .* at least 3: got 2"),
    (lambda: ZOOLOGY.batch(generator(), 0), "`batch_size`"),
    (lambda: ZOOLOGY.batch(0, 1), "`rng` must be an np.random.Generator"),
  ],
)
def test_wrong_sizes_are_refused(make, message, as_a_user):
  with pytest.raises(ValueError, match=message):
    make()
