"""Going back, making room and verifying drafts: always the exact state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from memcache_jax.caching import Cached, Constant, DropOldest, Logarithmic
from memcache_jax.decoding import mark, prefill, rewind, verify, with_room
from memcache_jax.memories import DecayedLinear
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  ModelConfig,
)
from memcache_jax.testing import assert_close
from tests.layers.cases import fast_to_compile, louder

VOCAB, SEGMENT, ROOM = 13, 4, 28


def _model(cached):
  config = ModelConfig(
    vocab_size=VOCAB,
    dim=8,
    num_layers=2,
    pattern=(MemorySpec(cached, 2), AttentionSpec(2)),
    hidden_dim=12,
    tie_embeddings=False,
  )
  return louder(LanguageModel(config, rngs=nnx.Rngs(0)), 12.0)


def _cached(*options, **named):
  return Cached(DecayedLinear.mamba2(), *options, **named)


@pytest.fixture(scope="module")
def model():
  return _model(_cached(Constant(SEGMENT)))


TEXT = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 24)))
read = fast_to_compile(prefill)


def test_rewinding_to_any_token(model):
  """From a border by its mark, and on by replaying part of a segment."""
  state = model.init_state(2, ROOM)
  marks = []
  for first in range(0, 24, SEGMENT):
    marks.append(mark(model, state))
    _, state = read(model, TEXT[:, first : first + SEGMENT], state)
  assert mark(model, state)[0].memory.memories is None
  expected = model.init_state(2, ROOM)
  for border, saved in enumerate(marks):
    back = rewind(state, saved)
    chex.assert_trees_all_equal(back, expected)
    first = border * SEGMENT
    _, expected = read(model, TEXT[:, first : first + SEGMENT], back)
  chex.assert_trees_all_equal(expected, state)


@pytest.mark.slow
def test_a_prefix_is_read_once_for_many_requests(model, tmp_path):
  """Exported from a state of its size, saved, and given room for more."""
  _, prefix = read(model, TEXT[:1, :16], model.init_state(1, 16))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "prefix", prefix)
  like = jax.eval_shape(lambda: model.init_state(1, 16))
  with ocp.StandardCheckpointer() as checkpointer:
    prefix = checkpointer.restore(tmp_path / "prefix", like)
  state = with_room(model, prefix, ROOM)
  state = jax.tree.map(lambda *x: jnp.concatenate(x), state, state)
  logits, state = read(model, TEXT[:, 16:20], state)
  same = jnp.repeat(TEXT[:1, :16], 2, axis=0)
  _, whole = read(model, same, model.init_state(2, ROOM))
  expected, whole = read(model, TEXT[:, 16:20], whole)
  assert_close((logits, state), (expected, whole))
  row = jax.tree.map(lambda x: x[1:], state)
  _, row = read(model, TEXT[1:, 20:], row)
  _, whole = read(model, TEXT[:, 20:], whole)
  assert_close(row, jax.tree.map(lambda x: x[1:], whole))


@pytest.mark.slow
def test_verifying_a_draft(model):
  """Rows accept different numbers of guesses, and go on where they ended."""
  _, state = read(model, TEXT[:, :6], model.init_state(2, ROOM))
  draft = [TEXT[:, 6]]
  after = state
  choices = []
  for _ in range(5):
    logits, after = read(model, draft[-1][:, None], after)
    choices.append(jnp.argmax(logits, axis=-1))
    draft.append(choices[-1])
  draft = jnp.stack(draft[:5], axis=1)
  wrong = (draft[0, 3] + 1) % VOCAB
  draft = draft.at[0, 3].set(wrong)  # row 0 guessed wrong, row 1 nothing
  got, chosen, state = fast_to_compile(verify)(model, draft, state)
  np.testing.assert_array_equal(got, [3, 5])
  np.testing.assert_array_equal(chosen, [choices[2][0], choices[4][1]])
  for row, length in enumerate((3, 5)):
    one = model.init_state(1, ROOM)
    _, one = read(model, TEXT[row : row + 1, :6], one)
    _, one = read(model, draft[row : row + 1, :length], one)
    assert_close(jax.tree.map(lambda x, r=row: x[r : r + 1], state), one)


@pytest.mark.usefixtures("as_a_user")
def test_errors(model):
  state = model.init_state(1, ROOM)
  with pytest.raises(ValueError, match="`max_length` must be at least the roo"):
    with_room(model, state, SEGMENT)
  with pytest.raises(ValueError, match="`draft` must have at least one"):
    verify(model, jnp.zeros((1, 0), jnp.int32), state)
  logarithmic = _model(_cached(Logarithmic(SEGMENT)))
  state = logarithmic.init_state(1, SEGMENT)
  with pytest.raises(ValueError, match="`max_length` must need no more block"):
    with_room(logarithmic, state, 16 * SEGMENT)
  with pytest.raises(ValueError, match="`model` must have caches that keep"):
    mark(logarithmic, state)
  forgetting = _model(_cached(Constant(SEGMENT), policy=DropOldest(2)))
  with pytest.raises(ValueError, match="`model` must have caches that keep"):
    mark(forgetting, forgetting.init_state(1, ROOM))


def test_what_was_lost_stays_lost_with_more_room(model):
  """Rows beyond their room are nan, and so they are in a larger one."""
  state = model.init_state(2, 8)
  mask = jnp.arange(24)[None] < jnp.array([[8], [24]])
  _, state = read(model, TEXT, state, mask=mask)
  logits, _ = read(model, TEXT[:, :4], with_room(model, state, ROOM))
  assert np.isfinite(logits[0]).all()
  assert np.isnan(logits[1]).all()


@pytest.mark.usefixtures("as_a_user")
def test_states_that_do_not_belong_together(model):
  early = model.init_state(2, ROOM)
  _, late = read(model, TEXT[:, :SEGMENT], early)
  saved = mark(model, late)
  for state, to, message in (
    (early, saved, "`state` must be later"),
    (saved, late, "`state` must be a whole state"),
    (saved, saved, "`state` must be a whole state"),
    (late, late, "`state` must be a whole state"),
    (with_room(model, late, 2 * ROOM), saved, "as much room"),
    (model.init_state(3, ROOM), saved, "as many rows"),
    (None, saved, "`to` must be a mark"),
  ):
    with pytest.raises(ValueError, match=message):
      rewind(state, to)
  for call in (
    lambda: mark(model, None),
    lambda: with_room(model, saved, ROOM),
    lambda: with_room(model, (), ROOM),
    lambda: verify(model, TEXT, None),
  ):
    with pytest.raises(ValueError, match="`state` must be a whole state"):
      call()
