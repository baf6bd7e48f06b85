"""The contract of every mixer: one list, shared properties.

Shapes and flags are the same wherever they can be, since every new
combination is a compilation.
"""

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from tests.layers import cases
from tests.layers.cases import DIM, MIXERS, make, run, run_pieces

# Segments one after another take long to compile.
NAMES = [
  pytest.param(name, marks=pytest.mark.slow if name == "context" else ())
  for name in MIXERS
]
ROWS, LENGTH = 2, 22
PIECES = cases.lengths_of_pieces(LENGTH)


def inputs(length=LENGTH, seed=0, rows=ROWS):
  return jax.random.normal(jax.random.key(seed), (rows, length, DIM))


def flags(mask=None, starts=None):
  """Both flags, since tests that need one share compiled code with others."""
  shape = (ROWS, LENGTH)
  return {
    "mask": jnp.asarray(np.ones(shape, bool) if mask is None else mask),
    "starts": jnp.asarray(np.zeros(shape, bool) if starts is None else starts),
  }


def random_flags(seed):
  rng = np.random.default_rng(seed)
  shape = (ROWS, LENGTH)
  return flags(rng.random(shape) < 0.8, rng.random(shape) < 0.2)


@st.composite
def splits(draw):
  left, lengths = LENGTH, []
  while left:
    length = draw(st.sampled_from([n for n in (1, 9) if n <= left]))
    lengths.append(length)
    left -= length
  return lengths


@pytest.mark.parametrize("with_flags", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_any_split_is_one_call(name, with_flags):
  layer = make(name)
  x = inputs()

  @hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
  @hypothesis.given(lengths=splits(), seed=st.integers(0, 99))
  def check(lengths, seed):
    given = random_flags(seed) if with_flags else {}
    start = layer.init_state(ROWS, LENGTH)
    whole, _ = run(layer, x, **given)
    y, state = run_pieces(layer, x, start, lengths, **given)
    _, expected = run_pieces(layer, x, start, PIECES, **given)
    chex.assert_trees_all_close(y, whole, atol=2e-5)
    chex.assert_trees_all_close(state, expected, atol=2e-5)

  check()


PLACES = {
  "leading": range(8, 20),
  "trailing": range(12),
  "inner": [*range(5), *range(13, 20)],
  "scattered": [0, 2, 3, 5, 8, 9, 10, 13, 14, 16, 17, 19],
}


@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_change_nothing(name):
  layer = make(name)
  x = inputs(length=12)
  start = layer.init_state(ROWS, LENGTH)
  lengths = cases.lengths_of_pieces(12)
  alone, end = run_pieces(layer, x, start, lengths)
  for place in PLACES.values():
    place = np.array(place)
    padded = np.full((ROWS, LENGTH, DIM), np.nan, np.float32)
    padded[:, ::3] = 1e30
    padded[0, place] = x[0]
    mask = np.zeros((ROWS, LENGTH), bool)
    mask[0, place] = True  # and a row of padding only
    padded = jnp.asarray(padded)
    y, _ = run(layer, padded, **flags(mask))
    chex.assert_trees_all_close(y[0, place], alone[0], atol=2e-5)
    assert not np.any(np.where(mask[..., None], 0, y))
    _, state = run_pieces(layer, padded, start, PIECES, **flags(mask))
    first = jax.tree.map(lambda leaf: leaf[0], state)
    expected = jax.tree.map(lambda leaf: leaf[0], end)
    chex.assert_trees_all_close(first, expected, atol=2e-5)
    second = jax.tree.map(lambda leaf: leaf[1:], state)
    untouched = jax.tree.map(lambda leaf: leaf[1:], start)
    chex.assert_trees_all_equal(second, untouched)


# Some end on a segment border.
DOCUMENTS = [5, 1, 8, 4, 4]
ENDS = np.cumsum(DOCUMENTS)
STARTS = np.zeros((ROWS, LENGTH), bool)
STARTS[:, ENDS[:-1]] = True


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_as_alone(name):
  layer = make(name)
  x = inputs()
  start = layer.init_state(ROWS, LENGTH)
  packed, _ = run(layer, x, **flags(starts=STARTS))
  _, state = run_pieces(layer, x, start, PIECES, **flags(starts=STARTS))
  for end, length in zip(ENDS, DOCUMENTS, strict=True):
    document = slice(end - length, end)
    lengths = cases.lengths_of_pieces(length)
    alone, alone_state = run_pieces(layer, x[:, document], start, lengths)
    chex.assert_trees_all_close(packed[:, document], alone, atol=2e-5)
  more = inputs(length=1, seed=3)
  expected, _ = run(layer, more, alone_state)
  chex.assert_trees_all_close(run(layer, more, state)[0], expected, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_stay_with_real_tokens_of_the_document(name):
  layer = make(name)
  graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
  mask = np.ones((ROWS, LENGTH), bool)
  mask[:, [1, 8, 9, 20]] = False
  given = flags(mask, STARTS)

  @cases.fast_to_compile
  def gradient(params, x, counted):
    def loss(params, x):
      layer = nnx.merge(graphdef, params, rest)
      y, _ = layer(x, max_unaligned_starts=len(DOCUMENTS), **given)
      return jnp.sum(jnp.where(counted[..., None], jnp.sin(y), 0))

    return jax.grad(loss, (0, 1))(params, x)

  clean = np.where(mask[..., None], inputs(), 0).astype(np.float32)
  dirty = np.where(mask[..., None], clean, np.nan).astype(np.float32)
  document = np.zeros((ROWS, LENGTH), bool)
  document[:, 6:14] = True
  of_clean = gradient(params, clean, document)
  chex.assert_tree_all_finite(of_clean)
  of_dirty = gradient(params, dirty, document)
  chex.assert_trees_all_close(of_dirty, of_clean, atol=1e-6)
  reached = np.max(np.abs(of_clean[1]), axis=-1)
  assert np.all(reached[document & mask] > 1e-3 * np.max(reached))
  # Not more than what is left when a sum of decays cancels.
  assert np.all(reached[~(document & mask)] <= 1e-6 * np.max(reached))


@pytest.mark.parametrize("name", NAMES)
def test_causal_to_the_bit(name):
  layer = make(name)
  x, other = inputs(), inputs(seed=1)
  y, _ = run(layer, x)
  for last in (0, 2, 3, 4, 7, 12, 20):
    changed = x.at[:, last + 1 :].set(other[:, last + 1 :])
    y_changed, _ = run(layer, changed)
    chex.assert_trees_all_equal(y_changed[:, : last + 1], y[:, : last + 1])
    assert np.all(np.any(y_changed[:, last + 1] != y[:, last + 1], axis=-1))


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_mix(name):
  layer = make(name)
  x = inputs()
  of_first = jax.tree.map(lambda leaf: leaf[0], run(layer, x))
  changed = run(layer, x.at[1].set(jnp.nan))
  changed = jax.tree.map(lambda leaf: leaf[0], changed)
  chex.assert_trees_all_equal(changed, of_first)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_close_and_recurrent_state_is_float32(name):
  layer, low = make(name), make(name, dtype=jnp.bfloat16)
  x = inputs()
  y, _ = run(layer, x)
  y_low, _ = run(low, x.astype(jnp.bfloat16))
  assert y_low.dtype == jnp.bfloat16
  error = y_low.astype(jnp.float32) - y
  assert jnp.sqrt(jnp.mean(error**2) / jnp.mean(y**2)) < 0.02
  of_memory, of_attention = {jnp.dtype(jnp.float32)}, {jnp.dtype(jnp.bfloat16)}
  kept = {
    "attention": of_attention,
    "window": of_attention,
    "context": of_memory | of_attention,
  }.get(name, of_memory)
  start = low.init_state(ROWS, LENGTH)
  _, state = jax.eval_shape(run, low, x.astype(jnp.bfloat16), start)
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(state)}
  assert kept <= dtypes <= kept | {jnp.dtype(jnp.int32)}
  chex.assert_trees_all_equal_shapes_and_dtypes(state, start)


@pytest.mark.parametrize("name", NAMES)
def test_works_in_both_modes(name, nnx_mode):
  def build(rngs):
    return MIXERS[name](rngs=rngs)

  layer = build(nnx.Rngs(0))
  x = inputs(length=1)
  start = layer.init_state(ROWS, LENGTH)
  y, _ = run(layer, x, start)
  graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
  merged = nnx.merge(graphdef, params, rest)
  chex.assert_trees_all_equal(run(merged, x, start)[0], y)
  stacked = jax.vmap(nnx.transform_metadata(build, partition=None))(
    nnx.Rngs(0).split(2)
  )
  second = jax.tree.map(lambda leaf: leaf[1], stacked)
  chex.assert_trees_all_equal_shapes_and_dtypes(second, layer)
  assert np.any(run(second, x, start)[0] != y)


@pytest.mark.parametrize("name", NAMES)
def test_equal_layers_share_compiled_code(name):
  x = inputs(length=1)
  start = make(name).init_state(ROWS, LENGTH)
  run(make(name), x, start)
  count = run._cache_size()
  run(make(name, rngs=nnx.Rngs(1)), x, start)
  assert run._cache_size() == count


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_are_no_change(name):
  layer = make(name)
  start = layer.init_state(ROWS, LENGTH)
  _, state = run(layer, inputs(length=9), start)
  y, after = run(layer, inputs(length=0), state)
  chex.assert_shape(y, (ROWS, 0, DIM))
  chex.assert_trees_all_equal(after, state)
  chex.assert_shape(run(layer, inputs(length=0))[0], (ROWS, 0, DIM))


@pytest.mark.parametrize("name", NAMES)
def test_wrong_inputs_are_named(name, as_a_user):
  layer = make(name)
  with pytest.raises(ValueError, match=r"`x` .* d=8.*\(2, 3, 7\)"):
    layer(jnp.zeros((2, 3, 7)))
  with pytest.raises(ValueError, match=r"`x` .*floating dtype: got int32"):
    layer(jnp.zeros((2, 3, DIM), jnp.int32))
  with pytest.raises(ValueError, match=r"`mask` .*t=3.*\(2, 4\)"):
    layer(inputs(length=3), mask=jnp.ones((2, 4), bool))
  with pytest.raises(ValueError, match=r"`starts` must be boolean"):
    layer(inputs(length=3), starts=jnp.ones((2, 3), jnp.int32))
  with pytest.raises(ValueError, match=r"`state.*\(3, "):
    layer(inputs(length=3), layer.init_state(3, 9))
  with pytest.raises(ValueError, match=r"`max_length` .* got 0"):
    layer.init_state(2, 0)
  with pytest.raises(ValueError, match=r"`dim` .*dim=8, num_heads=3"):
    type(layer)(8, 3, *cases.memory_of(layer), rngs=nnx.Rngs(0))
  for wrong in ((jnp.zeros((2, 3, DIM)), layer.init_state(2, 9)), [], {}):
    with pytest.raises(ValueError, match=r"`state` must be the .*State that"):
      layer(inputs(length=3), wrong)
  for name in ("x", "mask"):
    arguments = {"x": inputs(length=3), name: [[True] * 3] * 2}
    with pytest.raises(ValueError, match=f"`{name}` must be an array .* list"):
      layer(**arguments)
  make_one = lambda **options: type(layer)(
    8, 2, *cases.memory_of(layer), **options
  )
  with pytest.raises(ValueError, match="`rngs` must be an nnx.Rngs: got 0"):
    make_one(rngs=0)
  with pytest.raises(ValueError, match="`dtype` must be a floating dtype"):
    make_one(rngs=nnx.Rngs(0), dtype=jnp.int32)
