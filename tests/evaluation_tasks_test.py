"""Task files on local data, read by a model whose right score is known."""

import json
import pathlib
import re
import sys
import types

import pytest
from flax import nnx

from memcache_jax.models import LanguageModel
from memcache_jax.tasks import ByteTokenizer
from tests.evaluation_test import CONFIG, PREFIX

# The harness and what it imports are not ours to keep free of warnings.
pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore"),
]

FACT = "The capital is {}."
NAMES = ("Poseidonis", "Avalon", "Babel")


class Bytes(ByteTokenizer):
  bos_id, eos_id = PREFIX, PREFIX + 1


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
  """The command, run where the data lie, on what says what it has read.

  It finds the one fact in what reaches it of a prompt, writes it, and goes on
  with a line that only the right stop leaves out.
  """
  from examples.lm import evaluate
  from memcache_jax.evaluation import _harness

  def stream(model, prompts, *, max_new_tokens, **options):
    run.read.extend(prompts)
    rows = []
    for prompt in prompts:
      text = Bytes().decode(prompt)
      found = re.search(FACT.format(r"(\w+)"), text)
      answer = f" {found[1] if found else 'unknown'}"
      if "go on" in text:
        answer += "\nAtlantis"
      rows.append(Bytes().encode(answer)[:max_new_tokens])
    for place in range(max(map(len, rows))):
      yield [row[place] if place < len(row) else None for row in rows]

  model = LanguageModel(CONFIG, rngs=nnx.Rngs(0))
  monkeypatch.setattr(_harness, "stream", stream)
  monkeypatch.setattr(evaluate.export, "load", lambda path: (model, Bytes()))
  monkeypatch.chdir(tmp_path)

  def run(*flags):
    # Nothing but our own tasks and those of the test is looked at.
    flags = ["--model=unused", "--include=.", "--out=results.json", *flags]
    evaluate.main(flags)
    return json.loads(pathlib.Path("results.json").read_text())

  run.read = []
  return run


def write_lines(path, docs):
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))


def test_answers_in_context_are_found_and_counted(evaluate):
  question = "The capital is"
  docs = [
    {
      "doc_id": str(i),
      "context": f"[DOC] [TLE] A page [PAR] {FACT.format(name)} go on. "
      + question * (i % 2),
      "question": question,
      "answers": answers,
    }
    for i, (name, answers) in enumerate(
      [
        ("Poseidonis", ["of the sea", "POSEIDONIS"]),
        ("Avalon", ["Babel"]),
        ("Babel", ["Atlantis"]),  # stands behind the end of the line
        ("Avalon", ["Ava"]),
      ]
    )
  ]
  names = ("triviaqa", "drop", "nq_512", "nq_1024", "nq_2048")
  for name in names:
    write_lines(f"hazyresearch/based_{name}/validation.jsonl", docs)
  tasks = [f"based_{name}" for name in names]
  results = evaluate(f"--tasks={','.join(tasks)}")
  assert {name: results[name]["contains,none"] for name in tasks} == {
    name: 0.5 for name in tasks
  }


def test_prompts_are_the_context_and_the_question():
  from memcache_jax.evaluation import _in_context

  doc = {
    "context": " A page [PAR]. It is far. It IS It is ",
    "question": "It is",
    "answers": ["far"],
  }
  # As the original does, only what stands at the very end is taken off.
  assert _in_context.prompt(doc) == "A page [PAR]. It is far. It IS. It is"
  doc["context"] = " A page [PAR]. It is far..It ISIt is "
  assert _in_context.prompt(doc) == "A page [PAR]. It is far. It is"
  unmarked = _in_context.unmarked_prompt(doc)
  assert unmarked == "A page . It is far. It is"


def test_suites_name_our_tasks_and_longbench():
  import lm_eval
  from lm_eval.tasks import TaskManager

  from examples.lm import evaluate
  from memcache_jax.evaluation import TASKS

  theirs = pathlib.Path(lm_eval.__file__).parent / "tasks"
  folders = ("longbench", "swde", "fda", "squad_completion")
  manager = TaskManager(
    include_path=[TASKS, *(theirs / name for name in folders)],
    include_defaults=False,
  )
  suites = {*evaluate.SUITES["retrieval"], *evaluate.SUITES["longbench"]}
  assert suites <= set(manager.all_subtasks)
  assert len(suites) == 8 + 14


@pytest.fixture
def longbench(monkeypatch, tmp_path):
  """The harness's own definitions, on local data."""
  import lm_eval

  # What it scores Chinese, code and summaries with, and these tasks are not.
  for name, of in (("jieba", ""), ("fuzzywuzzy", "fuzz"), ("rouge", "Rouge")):
    module = types.ModuleType(name)
    if of:
      setattr(module, of, None)
    monkeypatch.setitem(sys.modules, name, module)
  theirs = pathlib.Path(lm_eval.__file__).parent / "tasks" / "longbench"
  filler = "A line about nothing, again and again.\n" * 20
  parts = (
    [FACT, filler, filler],
    [filler, FACT, filler],
    [filler, filler, FACT],
  )
  docs = [
    {
      "context": "".join(part).format(name),
      "question": "What is the capital?",
      "answers": ["another", name],
      "all_classes": list(NAMES),
    }
    for part, name in zip(parts, NAMES, strict=True)
  ]
  write_lines("docs.jsonl", docs)
  for name in ("hotpotqa", "trec"):
    (tmp_path / f"{name}.yaml").write_text(
      f"include: {theirs / name}.yaml\n"
      f"task: {name}\n"
      "dataset_path: json\n"
      "dataset_name: null\n"
      "dataset_kwargs:\n"
      "  data_files:\n"
      f"    test: {tmp_path / 'docs.jsonl'}\n"
    )
  return docs


def test_longbench_cuts_the_middle_if_asked_and_says_so(
  evaluate, longbench, capsys, caplog
):
  tasks = ("hotpotqa", "trec")
  whole = evaluate(f"--tasks={','.join(tasks)}")
  assert [whole[name]["score,none"] for name in tasks] == [1.0, 1.0]
  assert "cut_tokens" not in whole["hotpotqa"]
  assert "lost" not in capsys.readouterr().out

  # The fact in the middle is gone. An odd length keeps a token less.
  whole_tokens = sum(map(len, evaluate.read))
  evaluate.read.clear()
  cut = evaluate(f"--tasks={','.join(tasks)}", "--longest_prompt=1201")
  assert {len(prompt) for prompt in evaluate.read} == {1200}
  lost = whole_tokens - 6 * 1200
  for name in tasks:
    assert cut[name]["score,none"] == pytest.approx(2 / 3)
    assert cut[name]["cut_prompts"] == 3
  assert sum(cut[name]["cut_tokens"] for name in tasks) == lost
  assert "hotpotqa: 3 prompts lost" in capsys.readouterr().out
  warning = "6 of 6 prompts are longer than 1201 tokens and lose %d from the"
  assert warning % lost in caplog.text


def test_without_its_middle_a_prompt_has_both_ends():
  from memcache_jax.evaluation._generation import without_middle

  tokens = list(range(7))
  assert without_middle(tokens, None) == without_middle(tokens, 7) == tokens
  assert without_middle(tokens, 6) == [0, 1, 2, 4, 5, 6]
  assert without_middle(tokens, 5) == [0, 1, 5, 6]
  assert without_middle(tokens, 2) == [0, 6]
