"""What every memory promises, alone and cached; see models.py for the list.

All inputs of one length run through one compiled function per memory: masks
and document starts are always given, and what changes is their content.
"""

import functools
import inspect
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcache_jax.memories import Memory, scan_tokens
from memcache_jax.testing import (
  assert_close,
  random_tokens,
  scan_one_by_one,
  stream,
  take,
)
from tests.memories import models

LENGTH = 23
ROOM = 64


def _parametrize(memories):
  """One test per memory; all tests of a memory run in the same process."""
  return pytest.mark.parametrize(
    "memory",
    [
      pytest.param(memory, marks=pytest.mark.xdist_group(models.name(memory)))
      for memory in memories
    ],
    ids=models.name,
  )


every_memory = _parametrize((*models.MEMORIES, *models.OTHERS, *models.CACHED))
selection = _parametrize(models.SELECTION)


class _Compiled:
  """The compiled functions of a memory, shared by its tests."""

  def __init__(self, memory):
    self.params = memory.init_params(jax.random.key(0), models.SHAPE)
    self.scan = jax.jit(lambda s, x: memory.scan(self.params, s, x))
    self.empty = memory.init_state(
      self.params, models.SHAPE, 2, max_length=ROOM
    )

  def run(self, tokens):
    return self.scan(self.empty, tokens)

  def one_by_one(self, state, tokens):
    return stream(self.scan, state, tokens, [1])


@functools.cache
def compiled(memory):
  return _Compiled(memory)


def make(memory, seed=0, length=LENGTH, batch=2, mask=0.3, start=0.15, **kw):
  tokens = random_tokens(
    memory,
    models.SHAPE,
    batch,
    length,
    seed=seed,
    mask_probability=mask,
    start_probability=start,
    end_probability=0.2,
    **kw,
  )
  return replace(tokens, max_unaligned_starts=length)


def empty(memory):
  return compiled(memory).empty


@every_memory
def test_methods_take_what_the_protocol_says(memory):
  methods = inspect.getmembers(Memory, inspect.isfunction)
  for name, method in methods:
    if not name.startswith("_"):
      own = inspect.signature(getattr(type(memory), name))
      assert list(own.parameters) == list(inspect.signature(method).parameters)


@every_memory
def test_many_tokens_are_one_by_one(memory):
  """Same outputs and state, with masks and documents anywhere."""
  fns = compiled(memory)
  tokens = make(memory)
  expected = fns.one_by_one(empty(memory), tokens)
  assert_close(fns.scan(empty(memory), tokens), expected)


@selection
def test_any_split(memory):
  fns = compiled(memory)

  @settings(max_examples=6, deadline=None)
  @given(
    seed=st.integers(0, 99),
    mask=st.sampled_from([0.0, 0.4]),
    start=st.sampled_from([0.0, 0.2]),
    sizes=st.lists(st.sampled_from([1, 6]), min_size=LENGTH, max_size=LENGTH),
  )
  def check(seed, mask, start, sizes):
    tokens = make(memory, seed, mask=mask, start=start)
    tail = -sum(sizes[:5]) % LENGTH  # ends within one piece, not cut short
    sizes = [*sizes[:5], *[1] * tail]
    y, state = fns.one_by_one(empty(memory), tokens)
    assert_close(stream(fns.scan, empty(memory), tokens, sizes), (y, state))

  check()


@selection
def test_gradients_are_those_of_one_by_one(memory):
  """And the outputs, also without a state at first."""
  fns = compiled(memory)
  tokens = make(memory)
  weights = np.random.default_rng(1).standard_normal(tokens.v.shape)
  weights = jnp.asarray(weights, jnp.float32)
  floats = (tokens.q, tokens.k, tokens.v, dict(tokens.gates))

  def loss(scan, floats):
    q, k, v, gates = floats
    y = scan(replace(tokens, q=q, k=k, v=v, gates=gates))
    return jnp.sum(y * weights), y

  def fresh(tokens):
    return memory.scan(fns.params, None, tokens)[0]

  def one_by_one(tokens):
    return scan_one_by_one(memory, fns.params, empty(memory), tokens)[0]

  gradient = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)
  got, y = gradient(fresh, floats)
  expected, expected_y = gradient(one_by_one, floats)
  assert_close(got, expected, 1e-4)
  assert_close(y, expected_y)


@_parametrize((*models.MEMORIES, *models.OTHERS))
def test_scan_is_the_token_loop(memory):
  """The fast scan against the definition that needs only step and read.

  A memory that closes after reading leaves the same state; what it reads is
  compared in mlp_memory_test.py and deep_test.py.
  """
  fns = compiled(memory)
  tokens = make(memory)
  loop = jax.jit(lambda x: scan_tokens(memory, fns.params, None, x))
  (y, state), (want, last) = fns.run(tokens), loop(tokens)
  assert_close(state, last)
  if not memory.closes_after_reading:
    assert_close(y, want)


@every_memory
def test_nothing_optional_is_needed(memory):
  """A new sequence, short, without masks, starts, flags or a state."""
  params = memory.init_params(jax.random.key(0), models.SHAPE)
  tokens = random_tokens(memory, models.SHAPE, 2, 5)
  tokens = replace(tokens, mask=None, starts=None, segment_ends=None)
  y, _ = jax.eval_shape(lambda x: memory.scan(params, None, x), tokens)
  assert y.shape == tokens.v.shape


@every_memory
def test_tokens_are_written(memory):
  """Every parameter of the memory leaves its initial value, in every row."""
  fns = compiled(memory)
  first = memory.snapshot(empty(memory))
  # As many tokens as end no segment, after which memories start anew.
  mask = jnp.broadcast_to(jnp.arange(LENGTH) < 7, (2, LENGTH))
  tokens = replace(make(memory, start=0.0), mask=mask)
  if tokens.segment_ends is not None:
    ends = jnp.zeros_like(tokens.segment_ends)
    tokens = replace(tokens, segment_ends=ends)
  after = memory.snapshot(fns.run(tokens)[1])
  for old, new in zip(
    jax.tree.leaves(first), jax.tree.leaves(after), strict=True
  ):
    assert np.all(np.max(np.abs(new - old).reshape(2, -1), axis=1) > 1e-6)


@selection
def test_causal_to_the_bit(memory):
  run = compiled(memory).run
  tokens, other = make(memory, 1, start=0.0), make(memory, 2, start=0.0)
  other = replace(other, mask=jnp.ones_like(other.mask))
  before = run(tokens)[0]
  for t in (0, 4, 5, 9, 10, 21):
    late = jnp.arange(LENGTH)[None] > t

    def splice(a, b, late=late):
      return jnp.where(late.reshape(1, -1, *[1] * (a.ndim - 2)), b, a)

    after = run(jax.tree.map(splice, tokens, other))[0]
    np.testing.assert_array_equal(before[:, : t + 1], after[:, : t + 1])


@selection
def test_a_masked_token_does_not_exist(memory):
  """Whatever it holds, and wherever it stands."""
  fns = compiled(memory)
  tokens = make(memory, 3, start=0.0, mask=0.0)
  count = 14
  alone = take(tokens, 0, LENGTH)
  alone = replace(
    alone, mask=jnp.broadcast_to(jnp.arange(LENGTH) < count, (2, LENGTH))
  )
  expected, state = fns.scan(empty(memory), alone)
  rng = np.random.default_rng(0)
  inner = np.sort(rng.permutation(LENGTH)[:count])
  for places in (inner, np.arange(LENGTH - count, LENGTH)):
    padded = jax.tree.map(
      lambda x, p=places: _scatter(x, p, LENGTH), take(tokens, 0, count)
    )
    y, padded_state = fns.scan(empty(memory), padded)
    assert_close(y[:, places], expected[:, :count], 1e-6)
    assert not np.any(np.delete(np.asarray(y), places, axis=1))
    assert_close(padded_state, state, 1e-6)


def _scatter(x, places, length):
  """Puts tokens at `places`; all others are masked nan, 1e30 or True."""
  if x.dtype == jnp.bool_:
    full = np.zeros((x.shape[0], length), bool)
  else:
    full = np.full((x.shape[0], length, *x.shape[2:]), np.nan, np.float32)
    full[:, ::3] = 1e30
  full[:, places] = x
  return jnp.asarray(full)


@selection
def test_a_row_without_tokens(memory):
  fns = compiled(memory)
  tokens = make(memory, 4)
  mask = tokens.mask.at[0].set(False)
  before = fns.scan(empty(memory), tokens)[1]
  y, after = fns.scan(before, replace(tokens, mask=mask))
  first = lambda tree: jax.tree.map(lambda x: x[:1], tree)
  chex.assert_trees_all_close(first(after), first(before), atol=1e-7)
  assert not np.any(y[0])


@selection
def test_packed_documents_are_documents_alone(memory):
  run = compiled(memory).run
  lengths = (7, 1, models.SEGMENT, 10)
  assert sum(lengths) == LENGTH
  tokens = make(memory, 5, mask=0.0, start=0.0)
  starts = np.zeros((2, LENGTH), bool)
  starts[:, np.cumsum((0, *lengths[:-1]))] = True
  packed, state = run(replace(tokens, starts=jnp.asarray(starts)))
  first = 0
  for length in lengths:
    alone = jax.tree.map(lambda x, f=first: jnp.roll(x, -f, axis=1), tokens)
    mask = jnp.broadcast_to(jnp.arange(LENGTH) < length, (2, LENGTH))
    y, last = run(replace(alone, mask=mask))
    assert_close(packed[:, first : first + length], y[:, :length])
    first += length
  assert_close(state, last)
  # A change in the first document reaches no other one, not even a bit.
  changed = jax.tree.map(lambda x: x, tokens)
  changed = replace(changed, v=changed.v.at[:, :7].add(1.0))
  other = run(replace(changed, starts=jnp.asarray(starts)))[0]
  np.testing.assert_array_equal(other[:, 7:], packed[:, 7:])
  assert np.all(np.any(other[:, :7] != packed[:, :7], axis=(2, 3)))


@selection
def test_rows_never_mix(memory):
  run = compiled(memory).run
  tokens = make(memory, 6)
  y, state = run(tokens)
  flip = lambda tree: jax.tree.map(lambda x: x[::-1], tree)
  chex.assert_trees_all_close(run(flip(tokens)), flip((y, state)), atol=1e-6)
  v = tokens.v.at[1].multiply(3.0)
  mask = tokens.mask.at[1].set(~tokens.mask[1])
  other_y, other = run(replace(tokens, v=v, mask=mask))
  row = lambda tree: jax.tree.map(lambda x: x[0], tree)
  chex.assert_trees_all_equal(row((other_y, other)), row((y, state)))


@every_memory
def test_the_state_keeps_its_shape_and_is_float32(memory):
  fns = compiled(memory)
  tokens = make(memory, 7, dtype=jnp.bfloat16)
  state = empty(memory)
  y, after = jax.eval_shape(fns.scan, state, tokens)
  assert y.dtype == jnp.bfloat16
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
  for leaf in jax.tree.leaves(state):
    assert leaf.dtype in (jnp.float32, jnp.int32)
    assert leaf.shape[0] == 2


@selection
def test_no_tokens_change_nothing(memory):
  fns = compiled(memory)
  _, state = fns.scan(empty(memory), make(memory, 8))
  y, after = memory.scan(fns.params, state, take(make(memory, 8), 0, 0))
  assert y.shape == (2, 0, 2, 3)
  chex.assert_trees_all_equal(after, state)


@every_memory
def test_no_rows_are_an_error(memory):
  tokens = jax.tree.map(lambda x: x[:0], make(memory))
  with pytest.raises(ValueError, match="`q` must have at least one row"):
    memory.scan(compiled(memory).params, None, tokens)


@selection
def test_bfloat16_operands(memory):
  run = compiled(memory).run
  tokens = make(memory, 9, mask=0.0, start=0.0, dtype=jnp.bfloat16)
  exact = [x.astype(jnp.float32) for x in (tokens.q, tokens.k, tokens.v)]
  exact = replace(tokens, q=exact[0], k=exact[1], v=exact[2])
  y, state = run(tokens)
  exact_y, exact_state = run(exact)
  assert_close(y.astype(jnp.float32), exact_y, 2e-2)
  assert_close(state, exact_state, 2e-2)


@every_memory
def test_equal_memories_are_traced_once(memory):
  count = 0

  @functools.partial(jax.jit, static_argnums=0)
  def gates(memory, x):
    nonlocal count
    count += 1
    return len(memory.gates()) + x

  gates(memory, 0)
  gates(replace(memory), 0)
  assert count == 1
  assert hash(replace(memory)) == hash(memory)
