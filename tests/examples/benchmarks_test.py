"""The benchmarks refuse to time a wrong op, and write what they should."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from examples.benchmarks import (
  cases,
  check,
  compile_time,
  decode,
  decode_layers,
  decode_report,
  layer,
  layers,
  measure,
  ours,
  readme,
  report,
)
from memcache_jax.caching import _one_segment, _sparse_read
from memcache_jax.ops.linear_attention import _chunked

pytestmark = pytest.mark.slow

FEW = measure.Limits(calls=3, seconds=1.0, least=2)
PLAIN = cases.Case(tokens=16)
RIGHT = _chunked.linear_attention


def wrong_value(*args, **known):
  y, state = RIGHT(*args, **known)
  return 1.001 * y, state


def wrong_gradient(q, k, *args, **known):
  return RIGHT(q, jax.lax.stop_gradient(k), *args, **known)


def nan_in_one_place(*args, **known):
  y, state = RIGHT(*args, **known)
  return y.at[0, 3, 0, 0].set(jnp.nan), state


@pytest.mark.parametrize("op", [wrong_value, wrong_gradient, nan_in_one_place])
def test_a_wrong_op_is_not_timed(op, monkeypatch, capsys):
  monkeypatch.setattr(_chunked, "linear_attention", op)
  monkeypatch.setattr(measure, "repeat", lambda *_: pytest.fail("timed"))
  with pytest.raises(check.WrongResultError, match="Not timed") as error:
    ours.run(PLAIN, FEW)
  assert error.value.code not in (0, None)
  assert capsys.readouterr().out == ""


def test_a_right_op_is_timed(capsys):
  ours.run(PLAIN, FEW)
  records = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
  assert [record["mode"] for record in records] == list(cases.MODES)
  for record in records:
    assert record["tokens"] == 16
    assert record["check"] <= check.LIMIT
    assert 0 < record["cpu_ms_least"] <= record["cpu_ms"]
    assert record["first_call_s"] > 0
    assert 2 <= record["calls"] <= 3


@pytest.mark.parametrize(
  "case",
  [
    cases.Case(aggregate="ssc", segment=4, tokens=14),
    cases.Case(layer="mixer", aggregate="ssc", segment=4, tokens=14),
    cases.Case(memory="gated_delta", tokens=14),
  ],
  ids=str,
)
def test_the_definition_agrees_with_the_layer(case):
  ours = layers.build(case)
  definition = layers.build(case, implementation="reference")
  x = jax.random.normal(jax.random.key(0), (1, 14, cases.DIM))
  y = ours.apply(ours.params, x, None)[0]
  by_token = check.by_token(definition, ours.params, x)
  assert check.worst_error(y, by_token) <= check.LIMIT


def test_what_a_case_says_is_what_is_timed():
  """Every field that describes a memory makes another one."""
  case = cases.Case(memory="titans", aggregate="grm", segment=64)
  changes = [
    {"memory": "dla"},
    {"memory": "delayed_titans"},
    {"inner_batch": 256},
    {"aggregate": "ssc"},
    {"segment": 256},
    {"write_mode": "checkpoint"},
  ]
  changed = [dataclasses.replace(case, **change) for change in changes]
  memories = {repr(layers.memory(x)) for x in (case, *changed)}
  assert len(memories) == 1 + len(changes)
  for inner_batch in cases.INNER_BATCHES:
    alone = cases.Case(memory="titans", inner_batch=inner_batch)
    assert layers.memory(alone).inner_batch == inner_batch
  # What is left names the layer around it and the run.
  named = set().union(*changes) | {"package", "layer", "tokens"}
  assert named == {field.name for field in dataclasses.fields(case)}


def test_errors_are_relative_and_the_worst_counts():
  want = {"a": jnp.array([3.0, 4.0]), "b": jnp.ones((2, 2))}
  got = {"a": jnp.array([3.0, 4.5]), "b": jnp.ones((2, 2))}
  assert check.worst_error(got, want) == pytest.approx(0.1)
  check.require_right({"value": 0.5 * check.LIMIT})
  with pytest.raises(check.WrongResultError):
    check.require_right({"value": 0.0, "gradient": float("nan")})


def test_a_run_writes_its_results(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(cases, "layer_cases", lambda lengths: [PLAIN])
  out = tmp_path / "layer.jsonl"
  missing = tmp_path / "python"
  flags = [f"--rival-python={missing}", f"--jax-rival-python={missing}"]
  layer.main([*flags, f"--out={out}", "--jobs=1"])
  records = [json.loads(line) for line in out.read_text().splitlines()]
  assert [record.get("record") for record in records] == ["machine", None, None]
  assert {"commit", "cpu", "cores", "load", "versions"} <= set(records[0])
  printed = capsys.readouterr()
  assert "memory-caching is left out" in printed.err
  assert "| 16 | linear |" in printed.out
  assert "not measured" in printed.out


def test_a_run_ends_when_a_case_fails(monkeypatch):
  monkeypatch.setattr(
    cases, "layer_cases", lambda lengths: [cases.Case(layer="none")]
  )
  with pytest.raises(SystemExit, match="must be bare or mixer"):
    layer.main(["--rival-python=none", "--jax-rival-python=none"])


def times(
  package="memcache_jax",
  memory="linear",
  segment=64,
  inner_batch=0,
  peak_mib=None,
  **cpu_ms,
):
  case = cases.Case(
    package=package,
    memory=memory,
    inner_batch=inner_batch,
    aggregate="grm" if segment else "none",
    segment=segment,
  )
  record = {**vars(case), "version": "1", "peak_mib": peak_mib}
  record["first_call_s"] = 1
  return [record | {"mode": m, "cpu_ms": cpu_ms[m]} for m in cases.MODES]


def test_bars_say_met_or_missed():
  records = [
    *times(forward=10.0, forward_backward=40.0),
    *times(segment=0, forward=4.0, forward_backward=5.0),
    *times("memory-caching", forward=290.0, forward_backward=2e4),
    *times(memory="gated_delta", segment=0, forward=1.0, forward_backward=3.0),
    *times(
      "jax-linear-attention",
      "gated_delta",
      segment=0,
      forward=1.0,
      forward_backward=4.0,
    ),
  ]
  bars = report.bars(records)
  assert [bar.ratio for bar in bars] == [29.0, 2.5, 500.0, 8.0, 0.75]
  met = [bar.verdict() == "met" for bar in bars]
  assert met == [False, True, True, False, True]
  table = report.layer_table(records, "bare")
  assert len(table.splitlines()) == 2 + 5
  assert "jax-linear-attention 1: gated delta" in table
  assert "29.0x" in table
  for function in (report.bars, report.deep_bars, report.sparse_bars):
    empty = function([])
    assert {bar.verdict() for bar in empty} == {"not measured"}


def test_bars_of_deep_memories_say_met_or_missed():
  titans = {"memory": "titans", "segment": 0}
  ms = {"forward": 1.0, "forward_backward": 1.0}
  grm = {"memory": "dla", "forward": 1.0}
  delayed = titans | {"memory": "delayed_titans"}
  half = {name: 0.5 * value for name, value in ms.items()}
  records = [
    *times(**delayed, inner_batch=16, peak_mib=5.0, **half),
    *times(**titans, inner_batch=16, peak_mib=6.0, **ms),
    *times("titans-pytorch", **titans, inner_batch=16, peak_mib=10.0, **ms),
    *times(**grm, forward_backward=1.0),
    *times("memory-caching", **grm, forward_backward=25.0),
  ]
  bars = {bar.text: bar for bar in report.deep_bars(records)}
  assert len(bars) == 2 * 2 * len(cases.INNER_BATCHES) + 2
  verdicts = [bar.verdict() for bar in bars.values() if bar.ratio is not None]
  assert verdicts == ["met", "met", "missed", "missed", "met"]


def test_bars_of_selecting_say_met_or_missed():
  grm = times(forward=2.0, forward_backward=9.0, peak_mib=10.0)
  ssc = times(forward=2.0, forward_backward=2.0, peak_mib=11.0)
  ssc = [record | {"aggregate": "ssc"} for record in ssc]
  bars = report.sparse_bars(grm + ssc)
  assert [bar.ratio for bar in bars] == [4.5, 1.1]
  assert [bar.verdict() for bar in bars] == ["met", "missed"]


def test_compile_time_says_met_or_missed(monkeypatch):
  monkeypatch.setattr(sys, "argv", ["compile_time"])
  record = compile_time.compile_length(16, "residual", repeats=1)
  assert record["compile_s"] > 0
  slower = record | {"compile_s": 2 * record["compile_s"]}
  machine = {"commit": "a", "date": "d", "cpu": "b", "cores": 2, "system": "c"}
  machine |= {"python": "3", "versions": {}, "load": [0.1]}
  text = compile_time.markdown([machine, record, slower])
  assert "compile time 2.00x, bar below 1.5x: missed" in text
  assert "program 1.00x, bar at most 1.3x: met" in text


@pytest.fixture
def small(monkeypatch):
  """Decode layers that compile fast."""
  sizes = {"DIM": 32, "HEADS": 2, "SEGMENT": 16, "AHEAD": 32}
  sizes |= {"CHECKED": 37, "CHECKED_ROOM": 32 * 16, "PIECES": (18, 1, 18)}
  for name, value in sizes.items():
    monkeypatch.setattr(decode_layers, name, value)


def test_a_wrong_decode_step_is_not_timed(small, monkeypatch):
  read = _sparse_read.read_selected

  def wrong(*arguments):
    return 1.01 * read(*arguments)

  monkeypatch.setattr(_one_segment, "read_selected", wrong)
  monkeypatch.setattr(measure, "repeat", lambda *_: pytest.fail("timed"))
  with pytest.raises(check.WrongResultError, match="Not timed"):
    decode.run("linear", "ssc", (64,), FEW)


@pytest.mark.parametrize("case", [("linear", "ssc"), ("attention", "none")])
def test_a_right_decode_step_is_timed(case, small, capsys):
  decode.run(*case, (64, 128), FEW)
  records = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
  assert [record["context"] for record in records] == [64, 128]
  assert records[0]["state_mib"] < records[1]["state_mib"]
  assert decode_report.table(records).count("\n") == 2


def test_bars_of_decoding_say_met_or_missed():
  def record(memory, aggregate, context, cpu_ms):
    case = {"memory": memory, "aggregate": aggregate, "context": context}
    return case | {"cpu_ms": cpu_ms, "state_mib": 1.0}

  records = [
    record("linear", "ssc", 16, 1.0),
    record("linear", "ssc", 64, 1.2),
    record("linear", "grm", 64, 3.0),
  ]
  bars = decode_report.bars(records)
  verdicts = [bar.verdict() for bar in bars]
  assert verdicts == ["met", "missed", "not measured", "not measured"]
  assert {bar.verdict() for bar in decode_report.bars([])} == {"not measured"}


def test_tables_go_into_the_readme(tmp_path):
  path = tmp_path / "README.md"
  path.write_text("a\n<!-- layer -->\nold\n<!-- /layer -->\nb\n")
  readme.replace("layer", "new", path)
  assert path.read_text() == (
    "a\n<!-- layer -->\n\nnew\n\n<!-- /layer -->\nb\n"
  )
  with pytest.raises(ValueError, match="once"):
    readme.replace("other", "new", path)
  for part in ("layer", "deep", "sparse", "decode", "compile_time"):
    assert f"<!-- {part} -->\n" in readme.README.read_text()
