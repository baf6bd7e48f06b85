"""Text tasks: the answer is there, once, and budgets are kept to the token."""

import dataclasses
import re

import chex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcache_jax.tasks import (
  ByteTokenizer,
  Extraction,
  NeedleInHaystack,
  Phonebook,
  WordTokenizer,
  exact_match,
  string_match_all,
  string_match_any,
)
from memcache_jax.tasks import _words as words
from memcache_jax.tasks._base import largest
from tests.tasks.readers import find_line, find_needle, last_quarter

ESSAY = (
  'It rained on Mr. Grey all day. "Will it stop?" he asked. Nobody knew! '
  "The café stayed open until 10.30 in the evening and the lamps were lit. "
) * 3 + "At last he left"
PAGES = tuple(
  "\n".join(
    [f"Name: {name}", "Area: total: 12", f"Code: {name[:2]}"]
    + [f"Feature {n}: {name}{n * n} and {'x' * (1 + n % 7)}" for n in range(12)]
    + ["Twice: same thing", "Again: Same Thing", "Double: a1b", "Double: c2d"]
  )
  for name in ("Atlantis", "Lemuria")
)


def generator(seed: int = 0) -> np.random.Generator:
  return np.random.default_rng(seed)


# For lengths that are not those of bytes; most keys and names are spelled.
IN_WORDS = WordTokenizer.of_text(
  ESSAY
  + NeedleInHaystack(length=900).sample(generator()).prompt
  + Phonebook(length=900).sample(generator()).prompt
)
TASKS = {
  "noise": NeedleInHaystack(length=700, max_new_tokens=16),
  "essay": NeedleInHaystack(length=900, essays=ESSAY, max_new_tokens=16),
  "uuid": NeedleInHaystack(
    length=1500, essays=ESSAY, value="uuid", max_new_tokens=40
  ),
  "phonebook": Phonebook(length=600, max_new_tokens=16),
  "extraction": Extraction(length=240, documents=PAGES),
  "noise, in words": NeedleInHaystack(length=300, tokenizer=IN_WORDS),
  "essay, in words": NeedleInHaystack(
    length=400, essays=ESSAY, max_new_tokens=16, tokenizer=IN_WORDS
  ),
  "phonebook, in words": Phonebook(
    length=600, max_new_tokens=16, tokenizer=IN_WORDS
  ),
}
each_task = pytest.mark.parametrize("name", TASKS)


def reader_of(name: str):
  return find_line if name[0] == "p" or name == "extraction" else find_needle


def draw(task, count: int = 40) -> list:
  rng = generator()
  return [task.sample(rng) for _ in range(count)]


@each_task
def test_equal_seeds_give_equal_samples(name):
  task = TASKS[name]
  assert task.sample(generator(3)) == task.sample(generator(3))
  assert len({sample.prompt for sample in draw(task, 3)}) > 1


@each_task
def test_who_reads_all_is_right_and_who_reads_the_end_is_at_chance(
  name, as_a_user
):
  samples = draw(TASKS[name])
  answers = [sample.answers for sample in samples]
  reader = reader_of(name)
  whole = [reader(sample.prompt) for sample in samples]
  assert string_match_all(whole, answers) == 1.0
  assert string_match_any(whole, answers) == 1.0
  end = [last_quarter(reader)(sample.prompt) for sample in samples]
  assert string_match_all(end, answers) <= 0.25


@each_task
def test_the_answer_stands_once_and_where_it_is_said(name, as_a_user):
  for sample in draw(TASKS[name], 20):
    (answer,) = sample.answers
    prompt = sample.prompt
    assert prompt.count(answer) == 1
    assert answer in sample.continuation
    # Depth 0 is the first place in the context, 1 the last.
    if "extraction" not in name and "phonebook" not in name:
      start = prompt.index("\n") + 1
      needle = prompt.index("One of the special")
      fact = prompt.index(answer) + len(answer) + 1 - needle
      context = prompt.rindex("\n") - start
      assert sample.depth == pytest.approx((needle - start) / (context - fact))


@each_task
def test_budgets_are_kept_and_filled(name, as_a_user):
  task = TASKS[name]
  piece = 1 if name == "extraction" else 91  # a line of noise is the largest
  for sample in draw(task, 20):
    assert sample.num_tokens == len(task.tokenizer.encode(sample.prompt))
    room = task.length - task.max_new_tokens - sample.num_tokens
    assert room >= 0
    at_end = any(
      page.endswith(sample.prompt.rsplit(". ", 1)[0]) for page in PAGES
    )
    assert room < piece or at_end


@pytest.mark.parametrize("essays", [None, ESSAY])
@settings(max_examples=20, deadline=None)
@given(st.integers(480, 3000), st.integers(0, 5))
def test_a_needle_budget_leaves_no_room_for_another_piece(essays, length, seed):
  task = NeedleInHaystack(length=length, essays=essays, max_new_tokens=16)
  sample = task.sample(generator(seed))
  context = sample.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
  if essays is None:
    lines = [line for line in context.split("\n") if "magic" not in line]
    assert set(lines) == {
      "The grass is green. The sky is blue. The sun is yellow. Here we go. "
      "There and back again."
    }
    more = len(lines[0]) + 1
  else:
    text = re.sub(r"One of the special [^.]*\. ?", "", context).split()
    source = (ESSAY.split() * 20)[: len(text) + 1]
    assert text == source[:-1]  # from the start, in order, over and over
    more = len(source[-1].encode()) + 1
  assert sample.num_tokens + 16 <= task.length < sample.num_tokens + 16 + more


def test_needles_stand_between_sentences_at_forty_depths(as_a_user):
  samples = draw(TASKS["essay"], 200)
  sentence_ends = (".", "?", '"', "!")
  for sample in samples:
    context = sample.prompt.split("\n", 1)[1]
    before = context[: context.index("One of the special")].rstrip()
    # At the end, the last sentence may lack words that did not fit.
    assert before == "" or before.endswith(sentence_ends) or sample.depth == 1
    assert not before.endswith("Mr.")
  depths = np.array([sample.depth for sample in samples])
  assert (depths.min(), depths.max()) == (0, 1)
  assert 0.4 < depths.mean() < 0.6


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["noise", "essay", "phonebook"])
def test_a_stated_depth_is_kept(name, depth, as_a_user):
  task = dataclasses.replace(TASKS[name], length=3000, depth=depth)
  for sample in draw(task, 5):
    # Lines and sentences are steps.
    assert sample.depth == pytest.approx(depth, abs=0.05)


def test_lines_of_a_phone_book_are_all_different(as_a_user):
  for sample in draw(TASKS["phonebook"], 20):
    book, question = sample.prompt.split("\n\n")
    names, numbers = zip(
      *(line.split(": ") for line in book.split("\n")), strict=True
    )
    assert len(set(names)) == len(names) == len(set(numbers))
    *examples, asked = question.split("\n")
    assert len(set(examples)) == 2
    assert set(examples) < set(book.split("\n"))
    assert asked.removesuffix(":") in names
    assert all(re.fullmatch(r"\d{3}-\d{3}-\d{4}", n) for n in numbers)
  sample = Phonebook(length=999, num_entries=7).sample(generator())
  assert len(sample.prompt.split("\n\n")[0].split("\n")) == 7


def test_extraction_asks_only_what_has_one_answer():
  facts = Extraction(length=240, documents=PAGES).facts
  asked = {fact.attribute for fact in facts if fact.document == 0}
  # "Code" is too short, "Name" is in every feature, the others occur twice.
  assert asked == {"Area"} | {f"Feature {n}" for n in range(12)}
  assert all(PAGES[f.document][f.start :].startswith(f.line) for f in facts)


def test_extraction_cuts_around_the_answer_and_says_how_much(as_a_user):
  small = Extraction(length=240, documents=PAGES)
  for fact in small.facts:
    sample = small.ask(fact)
    window = sample.prompt.rsplit(". ", 1)[0]
    page = PAGES[fact.document]
    assert window in page
    assert sample.cut_tokens == len(page) - len(window) > 0
    before = window.index(fact.value)
    room = 240 - 50 - len(f". {fact.attribute}:")
    assert before == min(room // 2, page.index(fact.value))
  whole = Extraction(length=2000, documents=PAGES).sample(generator())
  assert whole.cut_tokens == 0
  assert any(whole.prompt.startswith(page) for page in PAGES)


@each_task
def test_batches_are_the_samples_shifted_by_one(name, as_a_user):
  task = TASKS[name]
  samples = draw(task, 4)
  batch = task.collate(samples)
  chex.assert_trees_all_equal(batch, task.batch(generator(), 4))
  chex.assert_shape(list(batch), (4, task.length))
  for row, sample in enumerate(samples):
    tokens = task.tokenizer.encode(sample.prompt + sample.continuation)
    end = len(tokens) - 1
    assert batch.tokens[row, :end].tolist() == list(tokens[:-1])
    assert batch.targets[row, :end].tolist() == list(tokens[1:])
    assert not batch.tokens[row, end:].any()
    assert batch.mask[row].tolist() == [t < end for t in range(task.length)]
    answer = batch.targets[row][batch.answer_mask[row]].tolist()
    assert task.tokenizer.decode(answer) == sample.continuation
  assert exact_match(batch.targets, batch) == 1.0
  wrong = batch.targets.copy()
  wrong[0, batch.answer_mask[0].nonzero()[0][-1]] += 1
  assert exact_match(wrong, batch) == 0.75


@pytest.mark.parametrize(
  "make",
  [
    lambda length: NeedleInHaystack(length=length),
    lambda length: NeedleInHaystack(length=length, essays=ESSAY),
    lambda length: Phonebook(length=length),
    lambda length: Phonebook(length=length, num_entries=9),
    lambda length: Extraction(length=length, documents=PAGES),
  ],
)
def test_the_smallest_length_is_named_and_enough(make, as_a_user):
  with pytest.raises(ValueError, match="`length` must be at least") as error:
    make(60)
  needed = int(re.findall(r"\d+", str(error.value))[0])
  with pytest.raises(ValueError, match="`length` must be at least"):
    make(needed - 1)
  for sample in draw(make(needed), 20):
    assert sample.num_tokens + make(needed).max_new_tokens <= needed


class NegativeTokenizer(ByteTokenizer):
  def encode(self, text: str) -> list[int]:
    return [-1] * len(text)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: NeedleInHaystack(length="9"), "`length` must be an integer"),
    (
      lambda: NeedleInHaystack(length=900, max_new_tokens=8),
      "`max_new_tokens` must be at least 9, .* got 8",
    ),
    (lambda: NeedleInHaystack(length=900, essays=" "), "`essays` must be a t"),
    (lambda: NeedleInHaystack(length=900, value="word"), "`value` must be"),
    (lambda: NeedleInHaystack(length=900, depth=2), "`depth` must be a num"),
    (lambda: NeedleInHaystack(length=900, tokenizer=str), "`tokenizer` must"),
    (lambda: WordTokenizer((" a", "b c")), "`words` must be letters, .*'b c'"),
    (lambda: WordTokenizer(("77",)), "`words` must be letters, .* got '77'"),
    (lambda: WordTokenizer((" a", "bc", " a")), "`words` .* ' a' 2 times"),
    (lambda: IN_WORDS.decode([5, 999]), "`tokens` must be from 0 to .* 999"),
    (lambda: Phonebook(length=900, num_entries=2), "`num_entries` .* least 3"),
    (lambda: Phonebook(length=900, num_entries=10**6), "at most 56"),
    (lambda: Extraction(length=900, documents="x: abc"), "tuple of texts"),
    (lambda: Extraction(length=900, documents=("x: ab",)), "got none in 1"),
    (lambda: TASKS["noise"].batch(generator(), 0), "`batch_size` must be an"),
    (
      lambda: NeedleInHaystack(length=900, tokenizer=NegativeTokenizer()).batch(
        generator(), 1
      ),
      "`tokenizer` must give ids from 0 to 255: got ids from -1 to -1",
    ),
  ],
)
def test_wrong_arguments_are_refused(make, message, as_a_user):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_phone_book_that_runs_out_of_names_is_an_error(monkeypatch):
  monkeypatch.setattr("memcache_jax.tasks._phonebook.MAX_ENTRIES", 5)
  with pytest.raises(ValueError, match="all names together"):
    Phonebook(length=900).sample(generator())


def test_a_key_or_value_in_the_essay_is_not_used(monkeypatch, as_a_user):
  monkeypatch.setattr("memcache_jax.tasks._needle.ADJECTIVES", ("red", "blue"))
  monkeypatch.setattr("memcache_jax.tasks._needle.NOUNS", ("hat",))
  task = NeedleInHaystack(length=900, essays="He wore a red-hat. " * 3)
  assert all("for blue-hat is" in s.prompt for s in draw(task, 9))


def test_words_are_distinct_and_plain():
  for name in ("ADJECTIVES", "NOUNS", "FIRST_NAMES", "LAST_NAMES"):
    found = getattr(words, name)
    assert len(set(found)) == len(found) > 100
    assert all(re.fullmatch("[A-Za-z]+", word) for word in found)
  assert not set(words.ADJECTIVES) & set(words.NOUNS)


@settings(max_examples=50, deadline=None)
@given(
  st.lists(st.integers(0, 9), min_size=1, max_size=60),
  st.integers(-5, 200),
  st.integers(0, 9),
)
def test_largest_is_largest(steps, room, start):
  counts = np.cumsum([start, *steps]).tolist()
  found = largest(counts.__getitem__, room, at_most=len(steps))
  fitting = [n for n, count in enumerate(counts) if n and count <= room]
  assert found == max(fitting, default=0)


def test_largest_counts_few_times():
  asked = []
  rng = generator()
  counts = np.cumsum(rng.integers(2, 12, 40_000)) + 300

  def count(size: int) -> int:
    asked.append(size)
    return int(counts[size])

  found = largest(count, 65_536, at_most=39_999)
  assert counts[found] <= 65_536 < counts[found + 1]
  assert len(asked) <= 14


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), IN_WORDS])
@settings(max_examples=20, deadline=None)
@given(text=st.text(alphabet="a I\n£é日_²7🙂", max_size=20))
def test_what_is_encoded_can_be_decoded(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_are_those_of_the_text():
  tokenizer = WordTokenizer.of_text("A cat,a cat_é is 123x²\nnot naïve.")
  assert tokenizer.words == (" cat", "é", " is", "not", " naïve")
  assert tokenizer.vocab_size == 256 + 5
  assert len(tokenizer.encode(" cat is not 12")) == 2 + len(" not 12")


def test_a_tokenizer_of_all_words_of_needles_spells_none(as_a_user):
  for task in (TASKS["noise"], TASKS["essay"]):
    tokenizer = WordTokenizer.of_text(task.words)
    for sample in draw(task, 50):
      tokens = tokenizer.encode(sample.prompt + sample.continuation)
      spelled = {chr(token) for token in tokens if token < 256}
      assert spelled <= {*' \n-:.,?!"0123456789', "A", "I"}, spelled


def test_scores():
  answers = [["Blue", "RED"], ["7"]]
  assert string_match_all(["dark blue\x00red", "77"], answers) == 1.0
  assert string_match_all(["blue", "8"], answers) == 0.25
  assert string_match_any(["blue", "8"], answers) == 0.5
  for outputs, wanted in [
    ([], []),
    (["a"], []),
    (["a"], ["abc"]),
    (["a"], [[]]),
    (["a"], [[""]]),
  ]:
    with pytest.raises(ValueError, match="`answers`"):
      string_match_any(outputs, wanted)
  batch = TASKS["noise"].batch(generator(), 1)
  with pytest.raises(ValueError, match=r"`predictions` .* \(1, 700\)"):
    exact_match(batch.targets[:, 1:], batch)
  nothing = batch._replace(answer_mask=batch.answer_mask & False)
  with pytest.raises(ValueError, match="answer mask is empty"):
    exact_match(batch.targets, nothing)
