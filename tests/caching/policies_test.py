"""What a full cache forgets, next to a simulation of the stated rules."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.caching import (
  Cached,
  Constant,
  DropOldest,
  GatedResidual,
  KeepMostUsed,
  Logarithmic,
  LogarithmicThinning,
  MergeNeighbours,
  Residual,
)
from memcache_jax.memories import HeadShape, Linear
from memcache_jax.testing import assert_close, random_tokens, stream
from tests.layers.cases import fast_to_compile

SHAPE = HeadShape(2, 6, 5)
C, SLOTS = 2, 4
T = 56  # seven times what the cache has room for
POLICIES = [
  DropOldest(SLOTS),
  LogarithmicThinning(SLOTS),
  KeepMostUsed(SLOTS),
  MergeNeighbours(SLOTS),
]


@dataclass
class Stored:
  """A memory of the simulation."""

  matrix: np.ndarray  # [n k v]
  key: np.ndarray  # [n k]
  index: int
  size: int = 1
  use: float = 0.0


def _shrink(policy, cache, count):
  """Applies the rule to the memories of `count` segments, the last one new."""
  match policy:
    case DropOldest():
      return cache[-policy.slots :]
    case LogarithmicThinning():

      def kept(end):
        level = 0
        while end % 2 ** (level + 1) == 0 and level < policy.slots - 2:
          level += 1
        return count - end < 2 ** (level + 1)

      return [m for m in cache if kept(m.index + 1)]
  if len(cache) <= policy.slots:
    return cache
  old = cache[:-1]
  if isinstance(policy, KeepMostUsed):
    rates = [m.use / (cache[-1].index - m.index) for m in old]
    del old[int(np.argmin(rates))]
  else:
    sizes = [a.size + b.size for a, b in zip(old[:-1], old[1:], strict=True)]
    i = int(np.argmin(sizes))
    a, b = old[i : i + 2]
    key = (a.size * a.key + b.size * b.key) / (a.size + b.size)
    merged = Stored(a.matrix + b.matrix, key, b.index, a.size + b.size)
    old[i : i + 2] = [merged]
  return [*old, cache[-1]]


def _simulate(policy, tokens, row):
  """y [t n v] and the final cache of one row, in float64."""
  q, k, v, u = (
    np.asarray(x[row], np.float64)
    for x in (tokens.q, tokens.k, tokens.v, tokens.gates["u"])
  )
  n = q.shape[1]
  outputs = np.zeros_like(v)
  cache = []

  def empty():
    return np.zeros((n, *SHAPE[1:])), np.zeros((n, SHAPE.key_dim)), 0

  matrix, pool, position = empty()
  count = 0
  for t in range(q.shape[0]):
    if not tokens.mask[row, t]:
      continue
    if tokens.starts[row, t]:
      cache, count = [], 0
      matrix, pool, position = empty()
    matrix = matrix + k[t, :, :, None] * v[t, :, None]
    pool, position = pool + k[t], position + 1
    keys = np.stack([m.key for m in cache] + [pool / position])
    logits = np.einsum("nk,snk->ns", u[t], keys)
    gates = np.exp(logits - logits.max(axis=1, keepdims=True))
    gates /= gates.sum(axis=1, keepdims=True)
    reads = np.stack([m.matrix for m in cache] + [matrix])
    outputs[t] = np.einsum("ns,nk,snkv->nv", gates, q[t], reads)
    for memory, gate in zip(cache, gates.T, strict=False):
      memory.use += gate.mean()
    if position == C:
      cache.append(Stored(matrix, pool / C, count))
      count += 1
      cache = _shrink(policy, cache, count)
      matrix, pool, position = empty()
  return outputs, cache


def _compiled(cached):
  return fast_to_compile(lambda s, tokens: cached.scan({}, s, tokens))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_streams_far_beyond_the_room(policy):
  """Rows with gaps and documents of their own, in calls of any size."""
  cached = Cached(Linear(), Constant(C), GatedResidual(), policy=policy)
  tokens = random_tokens(
    cached, SHAPE, 2, T, mask_probability=0.1, start_probability=0.03
  )
  assert np.any(tokens.starts[0])
  tokens = replace(tokens, starts=tokens.starts.at[1].set(False))
  scan = _compiled(cached)
  y, state = scan(None, tokens)
  for row in range(2):
    expected, cache = _simulate(policy, tokens, row)
    assert_close(y[row], jnp.asarray(expected, jnp.float32))
    index = [m.index for m in cache]
    np.testing.assert_array_equal(
      state.index[row], index + [-1] * (SLOTS - len(index))
    )
    matrices = np.stack([m.matrix for m in cache]).astype(np.float32)
    assert_close(state.memories[row, : len(cache)], matrices)
  assert state.index[1, -1] > 3 * SLOTS
  first = cached.init_state({}, SHAPE, 2)
  for size in (7, 1):
    assert_close(stream(scan, first, tokens, [size]), (y, state))


def test_merging_changes_no_sum_of_linear_reads():
  cached = Cached(
    Linear(), Constant(C), Residual(), policy=MergeNeighbours(SLOTS)
  )
  tokens = random_tokens(cached, SHAPE, 2, T)
  y, state = _compiled(cached)(None, tokens)
  plain = fast_to_compile(lambda tokens: Linear().scan({}, None, tokens)[0])
  assert_close(y, plain(tokens))
  sizes = np.diff(np.asarray(state.index), prepend=-1)
  assert sizes.sum() == 2 * T // C


def test_merging_averages_what_is_not_read_linearly():
  @dataclass(frozen=True)
  class Network(Linear):
    reads_linearly = False

  policy = MergeNeighbours(3)
  cached = Cached(Network(), Constant(C), policy=policy)
  state = cached.init_state({}, SHAPE, 2)
  matrices = jnp.arange(1.0, 4.0)[None, :, None, None, None]
  matrices = jnp.broadcast_to(matrices, state.memories.shape)
  state = state._replace(
    memories=matrices,
    index=jnp.array([[2, 3, 5], [0, 1, 2]]),  # of 3, 1, 2 and 1, 1, 1
    count=jnp.array([6, 3]),
  )
  made = policy.make_room(cached, state, jnp.array([True, False]))
  np.testing.assert_array_equal(made.index, [[2, 5, -1], [0, 1, 2]])
  got = made.memories[0, :, 0, 0, 0]
  np.testing.assert_allclose(got, [1.0, (2 + 2 * 3) / 3, 0.0], rtol=1e-6)
  np.testing.assert_array_equal(made.memories[1], matrices[1])


def test_gradients_flow_through_merged_memories():
  cached = Cached(
    Linear(), Constant(C), Residual(), policy=MergeNeighbours(SLOTS)
  )
  tokens = random_tokens(cached, SHAPE, 2, T)

  def last(memory, k):
    y, _ = memory.scan({}, None, replace(tokens, k=k))
    return jnp.sum(jnp.square(y[:, -1]))

  grad = fast_to_compile(jax.grad(last, argnums=1), static_argnums=0)
  plain = replace(cached, policy=None)
  assert_close(grad(cached, tokens.k), grad(plain, tokens.k))


@pytest.mark.usefixtures("as_a_user")
def test_wrong_arguments():
  for call, match in (
    (lambda: DropOldest(0), "`slots` must be an int of at least 1"),
    (lambda: MergeNeighbours(1), "`slots` must be at least 2"),
    (lambda: Cached(Linear(), policy="oldest"), "`policy` must be None or a"),
    (
      lambda: Cached(Linear(), Logarithmic(4), policy=DropOldest()),
      "`policy` must be None unless segments are Constant",
    ),
  ):
    with pytest.raises(ValueError, match=match):
      call()
  cached = Cached(Linear(), policy=DropOldest(3))
  other = replace(cached, policy=DropOldest(2)).init_state({}, SHAPE, 1)
  tokens = random_tokens(cached, SHAPE, 1, 3)
  with pytest.raises(ValueError, match="`state` must come from a memory with"):
    cached.scan({}, other, tokens)
