import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from memcache_jax.caching import Cached, Constant, Explicit
from memcache_jax.decoding import (
  _generate,
  decode_step,
  generate,
  prefill,
  stream,
)
from memcache_jax.decoding._sampling import Sampling
from memcache_jax.memories import DecayedLinear, Linear
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  ModelConfig,
)
from tests.layers.cases import fast_to_compile, louder

VOCAB, SEGMENT = 13, 4
CONFIG = ModelConfig(
  vocab_size=VOCAB,
  dim=8,
  num_layers=2,
  pattern=(
    MemorySpec(Cached(DecayedLinear.mamba2(), Constant(SEGMENT)), 2),
    AttentionSpec(2),
  ),
  hidden_dim=12,
  tie_embeddings=False,
)
ROOM = 24  # for all prompts here and 10 new tokens
NEW = 10
GREEDY = {"max_new_tokens": NEW, "temperature": 0}


@pytest.fixture(scope="module")
def model():
  return louder(LanguageModel(CONFIG, rngs=nnx.Rngs(0)), 12.0)


def prompt(length, seed=0):
  return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@fast_to_compile
def whole(model, tokens):
  return model(tokens)[0]


def recomputed(model, prompts):
  """Greedy continuation from the whole text, again for every token."""
  rows = [list(p) for p in prompts]
  for _ in range(NEW):
    tokens = np.zeros((len(rows), ROOM), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
      padded[: len(row)] = row
    # What is behind the last token is not seen, the model being causal.
    logits = np.asarray(whole(model, tokens))
    for number, row in enumerate(rows):
      row.append(int(np.argmax(logits[number, len(row) - 1])))
  return [row[-NEW:] for row in rows]


# Around the borders of segments, which are 4 long.
@pytest.mark.parametrize("lengths", [(1, 3, 4), (5, 8, 9)])
def test_ragged_rows_are_as_recomputed(model, lengths):
  rows = [prompt(length, seed=length) for length in lengths]
  expected = recomputed(model, rows)
  # Or the test shows nothing.
  assert all(len(set(row)) > 3 for row in expected)
  # Padded, all lengths share compiled code.
  assert generate(model, rows, length_multiple=ROOM, **GREEDY) == expected


def test_one_unpadded_row_is_as_recomputed(model):
  rows = np.array([prompt(5)])
  assert generate(model, rows, **GREEDY) == recomputed(model, rows.tolist())


def test_compiles_once(model):
  options = {"length_multiple": ROOM, **GREEDY}
  generate(model, [prompt(3), prompt(1), prompt(2)], **options)
  treedef = jax.tree.structure(model)
  compiled = _generate._compiled(treedef, Sampling(0))
  count = compiled.step._cache_size(), compiled.prefill._cache_size()
  misses = _generate._compiled.cache_info().misses
  same = louder(LanguageModel(CONFIG, rngs=nnx.Rngs(1)))
  generate(same, [prompt(9), prompt(5), prompt(4)], **options)
  assert _generate._compiled.cache_info().misses == misses
  assert (compiled.step._cache_size(), compiled.prefill._cache_size()) == count


def test_stop_tokens(model):
  rows = [prompt(5), prompt(1, 1), prompt(9, 2)]
  options = {"length_multiple": ROOM, **GREEDY}
  free = generate(model, rows, **options)
  stop = free[0][4]
  expected = [row[: row.index(stop)] if stop in row else row for row in free]
  assert len(expected[0]) <= 4
  assert generate(model, rows, stop_tokens=[stop], **options) == expected
  first = [row[0] for row in free]
  assert generate(model, rows, stop_tokens=first, **options) == [[], [], []]


def test_streams_as_it_comes(model):
  rows = [prompt(5), prompt(1, 1), prompt(9, 2)]
  options = {"length_multiple": ROOM, **GREEDY}
  free = generate(model, rows, **options)
  stop = next(t for t in free[0] if t not in free[2])
  steps = stream(model, rows, stop_tokens=[stop], **options)
  assert next(steps) == [None if row[0] == stop else row[0] for row in free]
  rest = list(steps)
  assert len(rest) == NEW - 1
  assert [step[2] for step in rest] == free[2][1:]
  assert rest[-1][0] is None


def test_a_key_decides(model):
  options = {"max_new_tokens": NEW, "length_multiple": ROOM}
  draw = lambda seed, temperature=1.0: generate(
    model,
    [prompt(5)] * 3,
    key=jax.random.key(seed),
    temperature=temperature,
    **options,
  )
  assert draw(0) == draw(0)
  assert draw(0) != draw(1)


def test_nan_is_loud(model):
  broken = jax.tree.map(lambda leaf: leaf * jnp.nan, model)
  with pytest.raises(FloatingPointError, match="row 0 are nan after 0 new"):
    generate(broken, [prompt(5)] * 3, length_multiple=ROOM, **GREEDY)


def test_prefill_in_pieces_with_padding_anywhere(model):
  tokens = np.array([prompt(9), prompt(9, 1)])
  padded = np.zeros((3, ROOM), np.int32)
  padded[:2, :9], padded[1, 9] = tokens, 6
  expected = np.asarray(whole(model, padded))
  # Row 0 in front, row 1 behind; the first piece of row 1 is empty.
  pieces = np.full((3, 2, 9), -1, np.int32)
  mask = np.zeros((3, 2, 9), bool)
  pieces[0, 0, :5], mask[0, 0, :5] = tokens[0, :5], True
  pieces[1, 0, :4], mask[1, 0, :4] = tokens[0, 5:], True
  pieces[1, 1, 2:], mask[1, 1, 2:] = tokens[1, :7], True
  pieces[2, 1, 7:], mask[2, 1, 7:] = tokens[1, 7:], True
  read, step = fast_to_compile(prefill), fast_to_compile(decode_step)
  state, last = model.init_state(2, ROOM), []
  for piece, real in zip(pieces, mask, strict=True):
    logits, state = read(model, piece, state, mask=real)
    last.append(np.asarray(logits))
  np.testing.assert_allclose(last[0][0], expected[0, 4], atol=1e-3)
  assert np.all(np.isnan(last[0][1]))
  np.testing.assert_allclose(last[1][0], expected[0, 8], atol=1e-3)
  np.testing.assert_allclose(last[2][1], expected[1, 8], atol=1e-3)
  # A row without a token in a step stays where it is.
  one = np.array([True, False])
  _, state = step(model, np.array([3, 4]), state, mask=one)
  logits, _ = step(model, np.array([5, 6]), state, mask=~one)
  np.testing.assert_allclose(logits[1], expected[1, 9], atol=1e-3)


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(
  seed=st.integers(0, 10_000),
  temperature=st.sampled_from([0.3, 1.0, 2.0]),
  top_k=st.sampled_from([None, 1, 3, 13]),
  top_p=st.sampled_from([None, 1e-3, 0.5, 0.9, 1.0]),
)
def test_distribution_that_is_drawn_from(seed, temperature, top_k, top_p):
  logits = np.random.default_rng(seed).normal(size=(2, VOCAB)) * 3
  expected = np.exp(logits / temperature)
  for row in expected:
    order = np.argsort(-row)
    kept = order if top_k is None else order[:top_k]
    if top_p is not None:
      before = np.cumsum(row[kept]) - row[kept]
      kept = kept[before / row[kept].sum() < top_p - 1e-9]
    row[np.setdiff1d(order, kept)] = 0
    row /= row.sum()
  sampling = Sampling(temperature, top_k, top_p)
  got = jax.nn.softmax(sampling.restrict(jnp.asarray(logits, jnp.float32)))
  np.testing.assert_allclose(got, expected, atol=1e-5)


def test_draws_follow_the_distribution():
  logits = jnp.log(jnp.array([0.5, 0.3, 0.2, 0.0]))
  logits = jnp.broadcast_to(logits, (20_000, 4))
  chosen = Sampling().choose(logits, jax.random.key(0))
  share = np.bincount(chosen, minlength=4) / 20_000
  np.testing.assert_allclose(share, [0.5, 0.3, 0.2, 0.0], atol=0.02)
  chosen = Sampling(top_k=2).choose(logits, jax.random.key(0))
  assert set(np.unique(chosen)) == {0, 1}
  assert np.all(Sampling(0).choose(logits, jax.random.key(0)) == 0)
  wrong = logits.at[7, 2].set(jnp.nan)
  chosen = Sampling().choose(wrong, jax.random.key(0))
  assert np.flatnonzero(chosen < 0).tolist() == [7]


def test_errors(model, as_a_user):
  def check(message, prompts=((1, 2),), **options):
    options = {**GREEDY, **options}
    for function in (generate, stream):
      with pytest.raises(ValueError, match=message):
        function(model, prompts, **options)

  check("`max_new_tokens` .* got 0", max_new_tokens=0)
  check("`temperature` .* got -1", temperature=-1)
  check("`temperature` .* got nan", temperature=float("nan"))
  check("`top_k` .* got 0", top_k=0)
  check("`top_k` must be at most the vocabulary, 13: got 14", top_k=14)
  check("`temperature` must be a number .* got 'hot'", temperature="hot")
  check("`temperature` must be 0 or at least", temperature=1e-40)
  check("`top_p` .* above 0 and at most 1: got 0", top_p=0.0)
  check("`top_p` .* above 0 and at most 1: got 1.5", top_p=1.5)
  check("`top_p` .* got 'a'", top_p="a")
  check(r"`stop_tokens` must be ids from 0 to 12: got \[13\]", stop_tokens=[13])
  for wrong in (3, [1.5], ["a"]):
    check("`stop_tokens` must be ids from 0 to 12: got", stop_tokens=wrong)
  check("`key` must be given unless", temperature=1.0)
  for wrong in (3, jnp.zeros(3), jax.random.split(jax.random.key(0))):
    check("`key` must be one key", temperature=1.0, key=wrong)
  check("`length_multiple` .* got 0", length_multiple=0)
  check("at least one prompt", prompts=[])
  for wrong in (None, 3, "abc", [[1, [2, 3]]]):
    check("`prompts` must be one sequence of ids per row", prompts=wrong)
  check(r"at least one id: got shape \(0,\) in row 1", prompts=[[1], []])
  check("`prompts` must be ids from 0 to 12: got 13", prompts=[[1], [13]])
  check("`prompts` .* integer dtype: got float64", prompts=[[1.0]])
  with pytest.raises(ValueError, match="`model` must be a LanguageModel"):
    generate(model.embedding, [[1]], **GREEDY)
  limited = Cached(Linear(), Explicit(2, 1))
  small = LanguageModel(
    ModelConfig.tiny(MemorySpec(limited, 2)), rngs=nnx.Rngs(0)
  )
  with pytest.raises(ValueError, match="at most 4 tokens, .* got 2 \\+ 3"):
    generate(small, [[1, 2]], max_new_tokens=3, temperature=0)


def test_steps_name_what_is_wrong(model, as_a_user):
  state = model.init_state(1, 4)
  ids = jnp.zeros((1, 1), jnp.int32)
  with pytest.raises(ValueError, match=r"`tokens` must have axes \(b\)"):
    decode_step(model, ids, state)
  with pytest.raises(ValueError, match="`state` must be what .* got None"):
    prefill(model, ids, None)


def test_options_may_be_iterators(model, as_a_user):
  first = generate(model, [[1, 2]], **GREEDY)[0][:1]
  prompts, stop_tokens = iter([[1, 2]]), iter(first)
  assert generate(model, prompts, stop_tokens=stop_tokens, **GREEDY) == [[]]
