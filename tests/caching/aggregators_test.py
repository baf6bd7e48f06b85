"""Averages of memories: their weights, and what they read."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.caching import Cached, Constant, MovingAverage
from memcache_jax.memories import HeadShape
from memcache_jax.testing import assert_close, random_tokens
from tests.layers.cases import fast_to_compile
from tests.memories.models import Saturating

SHAPE = HeadShape(2, 4, 3)
T, C = 18, 4


def _recursion(rate, memories):
  """The averages after each memory, as a weight per memory."""
  rows = np.eye(memories)
  averages = [rows[0]]
  for i in range(1, memories):
    r = 1 / (i + 1) if rate is None else rate
    averages.append((1 - r) * averages[-1] + r * rows[i])
  return averages


@pytest.mark.parametrize("rate", [None, 0.25, 1.0])
def test_weights_are_those_of_the_running_average(rate):
  """With free slots in between, whose weight is 0."""
  slots = np.array([1, 3, 4, 6])
  for count in range(5):
    readable = np.zeros((1, 8), bool)
    readable[0, slots[:count]] = True
    weights, own = MovingAverage(rate=rate).weights(
      None, None, jnp.asarray(readable)
    )
    expected = _recursion(rate, count + 1)[-1]
    assert not np.any(weights[~readable])
    np.testing.assert_allclose(weights[readable], expected[:-1], atol=1e-6)
    np.testing.assert_allclose(own, expected[-1:], atol=1e-6)


AVERAGES = [
  MovingAverage(of=of, rate=rate)
  for of in ("parameters", "outputs")
  for rate in (None, 0.25)
]


def test_reads_are_those_of_the_definition():
  """Of a memory that is not linear in its parameters, never reset."""
  ways = [
    Cached(Saturating(), Constant(C), average, "checkpoint")
    for average in AVERAGES
  ]
  tokens = random_tokens(ways[0], SHAPE, 2, T)
  tokens = replace(tokens, mask=None, starts=None)

  @fast_to_compile
  def run(tokens):
    return [way.scan({}, None, tokens)[0] for way in ways]

  matrix, stored = np.zeros((2, *SHAPE)), []
  read = lambda q, w: np.tanh(np.einsum("bnk,bnkv->bnv", q, w))
  expected = np.zeros((len(ways), 2, T, 2, 3))
  for t in range(T):
    q, k, v = (np.asarray(x[:, t]) for x in (tokens.q, tokens.k, tokens.v))
    matrix = 0.9 * matrix + np.einsum("bnk,bnv->bnkv", k, v)
    memories = [*stored, matrix]
    for i, average in enumerate(AVERAGES):
      weights = _recursion(average.rate, len(memories))[-1]
      pairs = list(zip(weights, memories, strict=True))
      if average.of == "parameters":
        expected[i, :, t] = read(q, sum(w * m for w, m in pairs))
      else:
        expected[i, :, t] = sum(w * read(q, m) for w, m in pairs)
    if t % C == C - 1:
      stored.append(matrix)
  got = run(tokens)
  assert_close(got, list(jnp.asarray(expected, jnp.float32)), 1e-5)
  # The four are not the same thing.
  for i, j in ((0, 1), (0, 2), (1, 3), (2, 3)):
    assert np.max(np.abs(got[i] - got[j])) > 1e-2


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5])
def test_wrong_rates(rate):
  match = f"`rate` must be a number above 0 and at most 1: got {rate}"
  with pytest.raises(ValueError, match=match):
    MovingAverage(rate=rate)


@pytest.mark.usefixtures("as_a_user")
def test_wrong_averages():
  with pytest.raises(ValueError, match="`of` must be one of .*: got 'gates'"):
    MovingAverage(of="gates")
