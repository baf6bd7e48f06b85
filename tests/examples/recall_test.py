"""The recall example trains, measures, and writes its results down."""

import importlib
import json
import pathlib
import typing

import jax
import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver

from examples.recall import main, model, report, sweep, tasks, training
from examples.recall.settings import (
  AggregateName,
  MemoryName,
  parse,
  plain,
)

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(
  f"{path.parent.name}.{path.stem}"
  for task in ("mqar", "needle")
  for path in (ROOT / "configs" / task).glob("*.py")
  if path.stem != "__init__"
)


def changed(folder, field, task="mqar"):
  """A config file that is `tiny` but for a field."""
  path = folder / "changed.py"
  path.write_text(
    f"from configs.{task} import tiny\n\n\n"
    "def get_config():\n"
    "  config = tiny.get_config()\n"
    f"  config.{field}\n"
    "  return config\n"
  )
  return path


# ml_collections loads config files in a way that Python has deprecated.
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@pytest.mark.parametrize(
  ("task", "lengths", "gates"), [("mqar", 1, True), ("needle", 2, False)]
)
@flagsaver.flagsaver()
def test_the_command_runs(tmp_path, capsys, task, lengths, gates):
  out, drawn = tmp_path / "results.json", tmp_path / "gates.png"
  config = ROOT / "configs" / task / "tiny.py"
  flags.FLAGS(
    ["main", f"--config={config}", f"--out={out}"]
    + [f"--gates={drawn}"] * gates
  )
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    main.main(["main"])
  assert capsys.readouterr().out.count("over 2 seeds") == lengths
  results = json.loads(out.read_text())
  assert [run["seed"] for run in results["runs"]] == [0, 1]
  for run in results["runs"]:
    assert len(run["accuracy"]) == lengths
    assert all(0 <= value <= 1 for value in run["accuracy"].values())
  assert results["settings"]["task"]["name"] == task
  assert not gates or drawn.stat().st_size > 1000


# As above.
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@pytest.mark.parametrize(
  ("aggregate", "arguments", "match"),
  [
    ("none", [], "--gates wants an aggregate"),
    (
      "residual",
      ["--sweep=headline", "--folder=x"],
      "--out and --gates are of",
    ),
    ("residual", ["--gates=x.foo"], "--gates must be a .png file in a folder"),
    ("residual", ["--out=none/x.json"], "--out must be a .json file in a fold"),
  ],
)
@flagsaver.flagsaver()
def test_flags_that_do_not_go_together(tmp_path, aggregate, arguments, match):
  config = changed(tmp_path, f"aggregate = {aggregate!r}")
  flags.FLAGS(["main", f"--config={config}", "--gates=x.png", *arguments])
  with pytest.raises(app.UsageError, match=match):
    main.main(["main"])


# As above.
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@flagsaver.flagsaver()
@pytest.mark.parametrize(
  ("change", "match"),
  [
    ("memory = 'foo'", "`memory` must be one of .*'foo'"),
    ("seeds = ()", "`seeds` must name one at least"),
  ],
)
def test_what_is_wrong_is_one_clear_line(tmp_path, change, match):
  config = changed(tmp_path, change)
  flags.FLAGS(["main", f"--config={config}"])
  with pytest.raises(app.UsageError, match=match):
    main.main(["main"])


# As above.
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@flagsaver.flagsaver()
def test_a_sweep_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
  config = ROOT / "configs" / "mqar" / "tiny.py"
  flags.FLAGS(
    ["main", f"--config={config}", "--sweep=headline", f"--folder={tmp_path}"]
  )
  trained, stop_after = [], 5

  def train(settings, seed, report):
    if len(trained) == stop_after:
      raise KeyboardInterrupt
    trained.append((settings, seed))
    return seed

  monkeypatch.setattr(training, "train", train)
  monkeypatch.setattr(
    training, "accuracy", lambda settings, params: {16: 0.5 + 0.25 * params}
  )
  with pytest.raises(SystemExit) as stop:
    main.main(["main"])
  assert stop.value.code == 130
  assert "stopped: what is done" in capsys.readouterr().out
  with (tmp_path / sweep.RESULTS).open("a") as file:
    file.write('{"settings": {"task"')  # what a crash leaves
  stop_after = None
  main.main(["main"])
  entries = sweep.headline(trained[-1][0])  # the memory, not attention
  assert len(trained) == 2 * len(entries)
  assert len(set(trained)) == len(trained)  # none of them twice
  main.main(["main"])
  assert len(trained) == 2 * len(entries)
  table = (tmp_path / report.TABLE).read_text()
  assert table.count("| 2 | 0.625 (0.500 to 0.750) |") == len(entries)
  assert table.strip() in capsys.readouterr().out
  assert (tmp_path / report.FIGURE).stat().st_size > 1000


def test_a_sweep_of_sizes_is_drawn_against_each_of_them(tmp_path):
  base = parse(_fields("mqar.small"))
  runs = sweep.runs("sizes", base, (0, 1))
  for run in runs:
    last = run.settings.task.stages[-1]
    value = run.settings.dim / (last.num_pairs * last.length) + run.seed
    sweep.append(tmp_path, run, {"accuracy": {last.length: value}})
  results = sweep.load(tmp_path)
  found = report.curves(runs, results, base)
  at = lambda pairs, length, dim: [dim / (pairs * length) + s for s in (0, 1)]
  sparse = {
    axis: by_model["linear, sparse"] for axis, by_model in found.items()
  }
  assert sparse == {
    "pairs": {26: at(26, 208, 32), 52: at(52, 208, 32)},
    "length": {n: at(52, n, 32) for n in (208, 416, 832)},
    "width": {n: at(52, 208, n) for n in (16, 32, 64)},
  }
  assert len(found["width"]) == len(sweep.headline(base))
  report.write(tmp_path, runs, results, base)
  assert (tmp_path / report.CURVES).stat().st_size > 1000
  one = [run for run in runs if run.name == "linear, 52 pairs"]
  assert report.curves(one, results, base) == {}  # nothing to draw against


def test_needles_are_drawn_against_the_lengths_of_the_tests(tmp_path):
  base = parse(_fields("needle.tiny"))
  runs = sweep.runs("headline", base, (0, 1))
  for run in runs[:-1]:  # the last one is not there yet
    accuracy = {length: run.seed / length for length in base.task.tests}
    sweep.append(tmp_path, run, {"accuracy": accuracy})
  table = report.write(tmp_path, runs, sweep.load(tmp_path), base)
  assert table.splitlines()[0] == "| model | seeds | 140 | 280 |"
  row = "| retnet | 2 | 0.004 (0.000 to 0.007) | 0.002 (0.000 to 0.004) |"
  assert row in table
  assert "| retnet, logarithmic | 1 | 0.000 (0.000 to 0.000) |" in table
  found = report.curves(runs, sweep.load(tmp_path), base)
  assert found.keys() == {"length"}
  assert found["length"]["retnet, residual"] == {
    140: [0, 1 / 140],
    280: [0, 1 / 280],
  }
  assert (tmp_path / report.CURVES).stat().st_size > 1000


@pytest.mark.parametrize("task", ["mqar", "needle"])
@pytest.mark.parametrize("name", sorted(sweep.SWEEPS))
def test_every_entry_of_a_sweep_is_another_model_or_task(name, task):
  settings = parse(_fields(f"{task}.small"))
  if (name, task) == ("sizes", "needle"):
    with pytest.raises(ValueError, match="`task` must be 'mqar' for a sweep"):
      sweep.runs(name, settings, (0,))
    return
  entries = {run.name: run.settings for run in sweep.runs(name, settings, (0,))}
  for entry in entries.values():
    model.config(entry)
    for stage in entry.task.stages:
      rows = entry.rows(stage.length)
      assert 1 <= rows <= entry.batch_tokens / stage.length
  assert len(set(entries.values())) == len(entries)


def _fields(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  fields = config.to_dict()
  del fields["seeds"]
  return fields


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_make_models_of_every_kind(name):
  module = importlib.import_module(f"configs.{name}")
  assert "Command:" in module.__doc__
  assert "Result:" in module.__doc__
  assert module.get_config().seeds
  fields = _fields(name)
  made = set()
  for memory in typing.get_args(MemoryName):
    for aggregate in typing.get_args(AggregateName):
      fields |= {"memory": memory, "aggregate": aggregate}
      if memory != "attention" or aggregate == "none":
        made.add(model.config(parse(fields)).pattern)
  assert parse(plain(parse(fields))) == parse(fields)
  soft = {"aggregate": "sparse", "selection": "straight_through"}
  for pooling in ("mean", "sum"):
    made.add(model.config(parse(fields | soft | {"pooling": pooling})).pattern)
  assert len(made) == 39  # no two of them are the same
  names = ("memory", "aggregate", "gate", "selection", "pooling", "write_mode")
  for name in names:
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*'typo'"):
      parse(fields | {name: "typo"})


@pytest.mark.parametrize(
  ("task", "change", "match"),
  [
    ("mqar", {"stages": ()}, "`stages` must be a tuple of at least one: got"),
    ("mqar", {"stages": (16, 2, 1)}, "`stages` must hold length .* got 16"),
    ("mqar", {"stages": ((16, 2, 1.5),)}, "`stages` must hold .*16, 2, 1.5"),
    ("mqar", {"stages": ((16, 2),)}, "\\(int\\), num_pairs .*\\(16, 2\\)"),
    ("mqar", {"stages": ((16, 2, 0),)}, "`steps` must be at least 1: got 0"),
    ("mqar", {"stages": ((16, 5, 1),)}, "`num_pairs` must be at most a quart"),
    ("needle", {"stages": ((140, 2, 1),)}, "haystack \\(bool\\), .*140, 2, 1"),
    (
      "needle",
      {"stages": ((60, True, 2),)},
      "`length` must be at least 113, 9",
    ),
    ("needle", {"stages": ((44, False, 2),)}, "`length` must be at least 45 "),
    ("needle", {"test_lengths": 280}, "`test_lengths` must be .* got 280"),
    ("needle", {"test_lengths": (60,)}, "`length` must be at least 113, 9 of"),
    ("needle", {"name": "typo"}, "`task` must have a name, .*'typo'"),
    ("needle", {"name": "mqar"}, "`task` must have \\['stages', 'vocab_size'"),
  ],
)
def test_wrong_fields_of_a_task_are_named(task, change, match):
  fields = _fields(f"{task}.tiny")
  with pytest.raises(ValueError, match=match):
    parse(fields | {"task": fields["task"] | change})


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"batch_tokens": 15}, "`batch_tokens` must hold a row of 16 tokens"),
    ({"test_rows": 0}, "`test_rows` must be an integer of at least 1: got 0"),
    ({"dim": 16.0}, "`dim` must be an integer of at least 1: got 16.0"),
    ({"memory": "attention"}, "`aggregate` must be 'none' for attention"),
  ],
)
def test_wrong_fields_are_named(change, match):
  with pytest.raises(ValueError, match=match):
    parse(_fields("mqar.tiny") | change)


def test_needles_without_a_haystack_are_ends_of_sentences():
  task = parse(_fields("needle.tiny")).task
  alone, haystack = (task.source(stage) for stage in task.stages)
  lengths = set()
  for seed in range(100):
    cut, whole = (
      source.sample(np.random.default_rng(seed)) for source in (alone, haystack)
    )
    assert (cut.answers, cut.continuation) == (
      whole.answers,
      whole.continuation,
    )
    needle, asked = cut.prompt.split("\n")
    assert needle.endswith(f" is: {cut.answers[0]}.")
    assert asked.endswith(" is")
    assert any(line.endswith(needle) for line in whole.prompt.split("\n"))
    assert whole.prompt.endswith(asked)
    assert cut.num_tokens == len(tasks.words().encode(cut.prompt))
    lengths.add(cut.num_tokens)
  assert (min(lengths), max(lengths)) == (13, 36)
  shortest = type(alone)(length=45).batch(np.random.default_rng(0), 100)
  assert shortest.mask[:, 43].any()
  assert not shortest.mask[:, 44].any()


def test_every_stage_is_trained_for_its_steps(monkeypatch):
  fields = _fields("mqar.tiny")
  fields["task"]["stages"] = ((8, 1, 2), (16, 2, 2))
  settings = parse(fields)
  seen = []

  def train_step(settings, state, tokens, targets, answer_mask):
    seen.append(tokens.shape)
    return state, 0.0

  monkeypatch.setattr(training, "train_step", train_step)
  training.train(settings, 0, lambda step, loss: None)
  assert seen == [(8, 8), (8, 8), (4, 16), (4, 16)]
