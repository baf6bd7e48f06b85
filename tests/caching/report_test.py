"""Reports of what is selected, against counting by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.caching import (
  Cached,
  Constant,
  DropOldest,
  GatedResidual,
  Logarithmic,
  SparseSelective,
  watch_selection,
)
from memcache_jax.memories import HeadShape, Linear
from memcache_jax.testing import random_tokens

SHAPE = HeadShape(2, 4, 3)
T, C, TOP_K = 40, 4, 2
MEMORY = Cached(Linear(), Constant(C), SparseSelective(TOP_K))


def _tokens():
  """A document starts in the first row, and the second has holes."""
  tokens = random_tokens(MEMORY, SHAPE, 2, T)
  starts = jnp.zeros((2, T), bool).at[0, 17].set(True)
  mask = jnp.ones((2, T), bool).at[1, jnp.array([3, 20, 21])].set(False)
  return replace(tokens, starts=starts, mask=mask, max_unaligned_starts=1)


def _count(tokens, slots):
  """Token by token, in NumPy."""
  selected, able, chance, mass = np.zeros((4, 2, 2, slots))
  entropies, overlaps = [], []
  k, u = np.asarray(tokens.k), np.asarray(tokens.gates["u"])
  for row, head in np.ndindex(2, 2):
    block, keys, pools, first, last = 0, [], [], 0, None
    for t in np.flatnonzero(tokens.mask[row]):
      if tokens.starts[row, t]:
        block, keys, pools = block + 1, [], []
        first, last = block, None
      keys.append(k[row, t, head])
      if len(pools) > TOP_K:
        logits = np.array([u[row, t, head] @ pool for pool in pools])
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen = set(np.argsort(-logits)[:TOP_K])
        for i in range(len(pools)):
          place = row, head, first + i
          able[place] += 1
          selected[place] += i in chosen
          chance[place] += TOP_K / len(pools)
          mass[place] += p[i]
        entropies.append(-np.sum(p * np.log(p)))
        if last is not None:
          overlaps.append(len(chosen & last) / TOP_K)
        last = chosen
      if len(keys) == C:
        pools.append(np.mean(keys, axis=0))
        block, keys, last = block + 1, [], None
  load = selected / np.maximum(chance, 1e-9)
  return {
    "share": selected / np.maximum(able, 1),
    "load": load,
    "entropy": np.mean(entropies),
    "overlap": np.mean(overlaps),
    "balance": np.sum(load * mass) / len(entropies),
  }


def test_counts():
  tokens = _tokens()
  report = jax.jit(lambda x: watch_selection(MEMORY, x))(tokens)
  want = _count(tokens, report.load.shape[-1])
  for name, number in want.items():
    got = getattr(report, name)
    np.testing.assert_allclose(got, number, atol=1e-5, err_msg=name)
  assert 0 < report.overlap < 1


def test_the_loss_is_that_of_switch_transformers():
  """For the tokens of the last segment, and lower where loads are even."""
  tokens = random_tokens(MEMORY, SHAPE, 1, (TOP_K + 2) * C)
  tokens = replace(tokens, mask=None, starts=None)
  k = tokens.k.reshape(-1, C, 2, 4).mean(axis=1)[:-1]
  u = tokens.gates["u"][0, -C:]
  p = jax.nn.softmax(jnp.einsum("tnk,snk->tns", u, k), axis=-1)
  hot = np.argsort(np.argsort(-p, axis=-1), axis=-1) < TOP_K
  share = np.mean(hot, axis=0) / TOP_K
  loss = len(k) * np.sum(share * np.mean(p, axis=0), axis=-1)

  @jax.jit
  def run(u):
    def balance(u):
      return watch_selection(MEMORY, replace(tokens, gates={"u": u})).balance

    return jax.value_and_grad(balance)(u)

  got, gradient = run(tokens.gates["u"])
  np.testing.assert_allclose(got, np.mean(loss), rtol=1e-5)
  assert not np.any(gradient[:, :-C])  # they read all there is
  after, _ = run(tokens.gates["u"] - 3.0 * gradient)
  assert after < got


def test_without_a_choice():
  tokens = random_tokens(MEMORY, SHAPE, 1, TOP_K * C)
  report = jax.jit(lambda x: watch_selection(MEMORY, x))(tokens)
  for number in report:
    assert not np.any(number)


@pytest.mark.parametrize(
  "memory",
  [
    Linear(),
    Cached(Linear(), Constant(C), GatedResidual()),
    Cached(Linear(), Logarithmic(C), SparseSelective()),
    Cached(Linear(), Constant(C), SparseSelective(), policy=DropOldest(4)),
  ],
)
@pytest.mark.usefixtures("as_a_user")
def test_what_cannot_be_watched(memory):
  with pytest.raises(ValueError, match="`memory` must be Cached, with Sparse"):
    watch_selection(memory, _tokens())
