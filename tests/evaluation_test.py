"""The harness gets what one parallel pass of the model gives."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import Cached, Constant, GatedResidual
from memcache_jax.decoding import generate
from memcache_jax.memories import Linear
from memcache_jax.models import LanguageModel, MemorySpec, ModelConfig
from memcache_jax.tasks import ByteTokenizer
from tests.layers.cases import fast_to_compile, louder

# The harness and what it imports are not ours to keep free of warnings.
pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore"),
]

PREFIX, LONGEST, PIECE = 10, 56, 16
CONFIG = ModelConfig(
  vocab_size=256,
  dim=16,
  num_layers=2,
  pattern=(MemorySpec(Cached(Linear(), Constant(4), GatedResidual()), 2),),
  hidden_dim=16,
)
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def model():
  return louder(LanguageModel(CONFIG, rngs=nnx.Rngs(0)))


def harness(model, **options):
  from memcache_jax.evaluation import HarnessModel

  options = {"prefix_token": PREFIX, "batch_size": 3, "piece": PIECE} | options
  tokenizer = options.pop("tokenizer", TOKENIZER)
  return HarnessModel(model, tokenizer, **options)


def continued(model, pair, max_new_tokens):
  """Two rows and one length, as the harness asks for them: compiled once."""
  return generate(
    model,
    [TOKENIZER.encode(prompt) for prompt in pair],
    max_new_tokens=max_new_tokens,
    temperature=0,
    length_multiple=PIECE,
  )


def requests(kind, arguments):
  from lm_eval.api.instance import Instance

  return [Instance(kind, {}, x, i) for i, x in enumerate(arguments)]


@fast_to_compile
def log_probabilities(model, tokens):
  return jax.nn.log_softmax(model(tokens)[0], axis=-1)


def parallel_score(model, context, end):
  # The harness moves spaces at the end of a context to what follows it.
  end = context[len(context.rstrip()) :] + end
  tokens = TOKENIZER.encode(context.rstrip()) or [PREFIX]
  start, tokens = len(tokens), tokens + TOKENIZER.encode(end)
  # One length for all: what is behind the last token is not seen.
  padded = np.zeros((1, LONGEST), np.int32)
  padded[0, : len(tokens)] = tokens
  scores = np.asarray(log_probabilities(model, padded))[0]
  scores = scores[start - 1 : len(tokens) - 1]
  chosen = scores[range(len(tokens) - start), tokens[start:]]
  greedy = np.argmax(scores, axis=-1) == tokens[start:]
  return float(chosen.sum()), bool(greedy.all())


def test_scores_are_those_of_one_pass_in_the_order_of_the_requests(model):
  """Shared contexts, none, and both sides longer than a piece."""
  pairs = [
    ("a question?", " yes"),
    ("", "all of it"),
    ("a question?", " a much longer answer"),
    ("b", " no"),
    ("a question?", " n"),
    ("a context that is longer than a piece", "!"),
    ("c", " no"),
    ("   ", " after spaces"),
  ]
  got = harness(model).loglikelihood(requests("loglikelihood", pairs))
  for (value, greedy), pair in zip(got, pairs, strict=True):
    want, likeliest = parallel_score(model, *pair)
    assert value == pytest.approx(want, rel=1e-5)
    assert greedy == likeliest


def test_the_likeliest_continuation_is_greedy(model):
  tokens, _ = continued(model, ("so", "or"), 1)
  text = bytes(tokens)
  assert text.decode("ascii", errors="ignore"), "choose another prompt"
  pairs = [("so", text.decode()), ("so", chr((tokens[0] + 1) % 128))]
  got = harness(model).loglikelihood(requests("loglikelihood", pairs))
  assert [greedy for _, greedy in got] == [True, False]


def test_whole_texts_are_one_pass_from_the_prefix(model):
  texts = ["short", "a text of several pieces, none of which is a window", ""]
  got = harness(model).loglikelihood_rolling(
    requests("loglikelihood_rolling", [(text,) for text in texts])
  )
  for value, text in zip(got, texts, strict=True):
    want = parallel_score(model, "", text)[0] if text else 0.0
    assert value == pytest.approx(want, rel=1e-5)


def test_generation_ends_before_a_stop_string(model):
  prompts = ["one", "another one", "x", "and this"]
  pairs = (prompts[:2], prompts[2:])
  rows = [row for pair in pairs for row in continued(model, pair, 6)]
  whole = [TOKENIZER.decode(row) for row in rows]
  stop = whole[1][2]
  got = harness(model, batch_size=2).generate_until(
    requests(
      "generate_until",
      [(p, {"until": [stop], "max_gen_toks": 6}) for p in prompts],
    )
  )
  assert got == [text.split(stop)[0] for text in whole]
  # Options that say nothing, as tasks have them.
  nothing = {"until": [""], "max_gen_toks": None, "temperature": None}
  longest = harness(model, batch_size=2, max_new_tokens=6).generate_until(
    requests("generate_until", [(p, nothing) for p in prompts])
  )
  assert longest == whole
  with pytest.raises(ValueError, match="`gen_kwargs`.*'beams'"):
    harness(model).generate_until(
      requests("generate_until", [("a", {"beams": 2})])
    )


def test_the_command_scores_a_model_whose_score_is_known(
  tmp_path, monkeypatch, capsys
):
  """A uniform model of bytes has 8 bits per byte, whatever the text."""
  from examples.lm import evaluate

  class Bytes(ByteTokenizer):
    bos_id, eos_id = PREFIX, PREFIX + 1

  model = LanguageModel(CONFIG, rngs=nnx.Rngs(0))
  model.embedding.table[...] = jnp.zeros_like(model.embedding.table[...])
  monkeypatch.setattr(evaluate.export, "load", lambda path: (model, Bytes()))
  data = tmp_path / "texts.jsonl"
  texts = ["A first text, ASCII only.", "And one more of them."]
  data.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
  (tmp_path / "known.yaml").write_text(
    f"""
task: known
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""
  )
  out = tmp_path / "results.json"
  monkeypatch.setitem(evaluate.SUITES, "commonsense", ("known",))
  flags = ["--suite=commonsense", f"--include={tmp_path}", f"--out={out}"]
  evaluate.main(["--model=unused", *flags])
  value = json.loads(out.read_text())["known"]["bits_per_byte,none"]
  assert value == pytest.approx(8.0, rel=1e-6)
  assert "bits_per_byte" in capsys.readouterr().out
  with pytest.raises(SystemExit):
    evaluate.main(["--model=unused", "--suite=commonsense", "--tasks=known"])


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    ("prefix_token", 256),
    ("prefix_token", -1),
    ("prefix_token", None),
    ("tokenizer", None),
    ("batch_size", 0),
    ("piece", 0),
    ("max_new_tokens", 0),
    ("longest_prompt", 0),
    ("longest_prompt", 1),
  ],
)
@pytest.mark.usefixtures("as_a_user")
def test_errors_name_the_argument(model, argument, value):
  with pytest.raises(ValueError, match=f"`{argument}`"):
    harness(model, **{argument: value})


def test_marks_of_documents_end_what_is_generated(model):
  """There another document would begin."""
  tokens, _ = continued(model, ("one", "two"), 6)
  want = TOKENIZER.decode(tokens[: tokens.index(tokens[2])])
  for marks in ({"prefix_token": tokens[2]}, {"stop_tokens": [tokens[2]]}):
    got = harness(model, max_new_tokens=6, **marks)
    text, _ = got.generate_until(
      requests("generate_until", [(p, {"until": []}) for p in ("one", "two")])
    )
    assert text == want


def test_what_cannot_be_scored_is_an_error():
  """Not a nan, of which a task would make an answer."""
  gates = GatedResidual(gate="input", max_segments=2)
  memory = Cached(Linear(), Constant(4), gates)
  config = dataclasses.replace(CONFIG, pattern=(MemorySpec(memory, 2),))
  model = LanguageModel(config, rngs=nnx.Rngs(0))
  with pytest.raises(FloatingPointError, match="1 . 40 tokens"):
    harness(model).loglikelihood_rolling(
      requests("loglikelihood_rolling", [("a" * 40,)])
    )

  class Wrong(ByteTokenizer):
    def encode(self, text):
      return [300]

  with pytest.raises(ValueError, match="`tokenizer`.*300"):
    harness(model, tokenizer=Wrong()).loglikelihood_rolling(
      requests("loglikelihood_rolling", [("a",)])
    )
