"""Token moves against loops over single tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memcache_jax import token_layout

ROWS, TOKENS, BLOCK, BLOCKS = 2, 13, 4, 12

# One program each for all examples, and none for every operation.
compact = jax.jit(token_layout.compact)
document_starts = jax.jit(token_layout.document_starts)
age_in_document = jax.jit(token_layout.age_in_document)


@jax.jit
def align_and_count(mask, starts, position, ends, flagged):
  grid = token_layout.align(mask, starts, position, BLOCK, BLOCKS, flagged)
  counted = token_layout.blocks_before(mask, starts, position, BLOCK, ends)
  return grid, *counted


flags = hnp.arrays(bool, (ROWS, TOKENS))
positions = hnp.arrays(np.int32, (ROWS,), elements=st.integers(0, BLOCK - 1))


@settings(max_examples=60, deadline=None)
@given(flags, flags, positions, st.none() | flags)
def test_align(mask, starts, position, ends):
  ends = np.zeros_like(mask) if ends is None else ends
  flagged = ends if np.any(ends) else None
  results = align_and_count(mask, starts, position, ends, flagged)
  grid, before, running = jax.device_get(results)
  for row in range(ROWS):
    place = int(position[row])
    first = 0
    fresh = set()
    expected = {}
    for t in range(TOKENS):
      if not mask[row, t]:
        continue
      if starts[row, t]:
        place += -place % BLOCK
        first = place // BLOCK
        fresh.add(first)
      expected[t] = place
      assert int(before[row, t]) == place // BLOCK - first
      assert bool(running[row, t]) == (not fresh)
      place += 1
      if ends[row, t]:
        place += -place % BLOCK
    fits = {t: p for t, p in expected.items() if p < BLOCKS * BLOCK}
    assert bool(grid.overflow[row]) == (len(fits) < len(expected))
    valid = grid.valid[row].reshape(-1)
    source = grid.source[row].reshape(-1)
    assert sorted(fits.values()) == list(np.flatnonzero(valid))
    for t in range(TOKENS):
      assert bool(grid.placed[row, t]) == (t in fits)
      if t in fits:
        assert int(grid.target[row, t]) == fits[t]
        assert source[fits[t]] == t
    assert fresh & set(range(BLOCKS)) == set(np.flatnonzero(grid.fresh[row]))
    used = max((p // BLOCK for p in fits.values()), default=0) + 1
    if not bool(grid.overflow[row]):
      assert int(grid.blocks[row]) == used


@settings(max_examples=40, deadline=None)
@given(flags)
def test_compact(mask):
  plan = jax.device_get(compact(mask))
  for row in range(ROWS):
    real = np.flatnonzero(mask[row])
    assert int(plan.count[row]) == len(real)
    np.testing.assert_array_equal(plan.source[row, : len(real)], real)
    np.testing.assert_array_equal(plan.target[row, real], np.arange(len(real)))
    assert np.sum(plan.valid[row]) == len(real)


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.int32, (ROWS, TOKENS), elements=st.integers(0, 2)), flags)
def test_document_starts(ids, mask):
  starts = np.asarray(document_starts(ids, mask))
  for row in range(ROWS):
    before = None
    for t in range(TOKENS):
      expected = mask[row, t] and before is not None and ids[row, t] != before
      assert bool(starts[row, t]) == expected
      if mask[row, t]:
        before = ids[row, t]


def test_document_starts_of_no_array(as_a_user):
  with pytest.raises(ValueError, match=r"`segment_ids` must be .* got list"):
    token_layout.document_starts([[1, 1, 2]])
  with pytest.raises(ValueError, match=r"`mask` must be .* got shape \(3,\)"):
    token_layout.document_starts(jnp.ones((1, 3), int), jnp.ones(3, bool))


@settings(max_examples=40, deadline=None)
@given(flags, hnp.arrays(np.int32, (ROWS,), elements=st.integers(0, 5)))
def test_age_in_document(starts, age_before):
  ages = np.asarray(age_in_document(starts, age_before))
  for row in range(ROWS):
    age = int(age_before[row])
    for t in range(TOKENS):
      age = 0 if starts[row, t] else age
      assert int(ages[row, t]) == age
      age += 1
