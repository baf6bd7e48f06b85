"""Throughput is that of right models, and a run goes on where it was."""

import json

import jax
import jax.numpy as jnp
import pytest

from examples.benchmarks import (
  check,
  measure,
  models,
  readme,
  throughput,
  throughput_figure,
  throughput_worker,
)
from examples.benchmarks.throughput_worker import Most
from memcache_jax.ops.linear_attention import _chunked

pytestmark = pytest.mark.slow

FEW = measure.Limits(calls=2, seconds=1.0, least=1)
TINY = models.Sizes(
  dim=16, num_heads=2, num_layers=1, segment=8, piece=16, checked=24
)
RIGHT = _chunked.linear_attention


def wrong_gradient(q, k, *args, **known):
  return RIGHT(q, jax.lax.stop_gradient(k), *args, **known)


def test_a_wrong_model_is_not_timed(monkeypatch, capsys):
  monkeypatch.setattr(_chunked, "linear_attention", wrong_gradient)
  monkeypatch.setattr(measure, "repeat", lambda *_: pytest.fail("timed"))
  with pytest.raises(check.WrongResultError, match="gradient"):
    throughput_worker.run("linear", [16], Most(1e9, 1e9), TINY, FEW)
  assert capsys.readouterr().out == ""


def test_a_right_model_is_timed_and_what_takes_too_much_is_left_out(capsys):
  """With JAX's attention, whose definition is our own."""
  name = models.TRANSFORMER
  throughput_worker.run(name, [32, 16], Most(1e-9, 1.0), TINY, FEW)
  records = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
  assert [(r["tokens"], r["mode"]) for r in records] == [
    *[(16, "train"), (16, "decode"), (32, "train"), (32, "decode")]
  ]
  timed = [r["cpu_ms"] > 0 for r in records if "cpu_ms" in r]
  assert timed == [True] * 3
  assert records[2]["left_out"] == "over 1e-09 s"
  assert all(r["check"] <= check.LIMIT for r in records)
  made = models.functions(models.config(name, TINY))
  left = throughput_worker._train(made, 16, Most(1.0, 0.0), FEW)
  assert left["left_out"].endswith("GiB")


def test_the_models_are_what_their_names_say():
  configs = [models.config(name, TINY) for name in models.NAMES]
  assert len(set(configs)) == len(configs)
  for name in models.NAMES:
    definition = models.config(name, TINY, "reference")
    params = jax.eval_shape(lambda c=definition: models.functions(c).params)
    made = jax.eval_shape(
      lambda n=name: models.functions(models.config(n, TINY)).params
    )
    assert jax.tree.structure(params) == jax.tree.structure(made)
  with pytest.raises(ValueError, match="`name` must be one of .*'nothing'"):
    models.config("nothing", TINY)


def test_a_state_has_read_what_it_says():
  made = models.functions(models.config("linear, GRM", TINY))
  text = models.ids(32)
  state = models.after(made, TINY, 32, 4)
  whole = made.init_state(made.params, 36)
  _, whole = made.read(made.params, text, whole)
  assert (
    check.worst_error(
      jax.tree.map(lambda x: x.astype(jnp.float32), state),
      jax.tree.map(lambda x: x.astype(jnp.float32), whole),
    )
    < 1e-5
  )


def fake_worker(stop_after=None):
  def worker(name, lengths, core, arguments):
    done = 0
    for tokens in lengths:
      for mode in throughput.MODES:
        if done == stop_after:
          raise KeyboardInterrupt
        done += 1
        worker.ran.append((name, tokens, mode))
        record = {"model": name, "tokens": tokens, "mode": mode}
        if (tokens, mode) == (64, "train"):
          yield record | {"left_out": "9.0 GiB"}
        else:
          yield record | {"cpu_ms": 2.0 * tokens}

  worker.ran = []
  return worker


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
  out, figure = tmp_path / "runs" / "out.jsonl", tmp_path / "figure.png"
  flags = [f"--out={out}", "--lengths", "64", "32", f"--figure={figure}"]
  flags += ["--models", "linear", "SWLA", "--jobs=1"]
  first = fake_worker(stop_after=3)
  monkeypatch.setattr(throughput, "_worker", first)
  with pytest.raises(KeyboardInterrupt):
    throughput.main(flags)
  with out.open("a") as file:
    file.write('{"model": "lin')  # what a crash leaves
  second = fake_worker()
  monkeypatch.setattr(throughput, "_worker", second)
  throughput.main(flags)
  # A length is run again as a whole.
  assert set(second.ran) == {
    *[("linear", 64, mode) for mode in throughput.MODES],
    *[("SWLA", n, mode) for n in (32, 64) for mode in throughput.MODES],
  }
  third = fake_worker()
  monkeypatch.setattr(throughput, "_worker", third)
  throughput.main(flags)
  assert third.ran == []
  text = capsys.readouterr().out
  assert "| model | 32 | 64 |" in text
  assert "| SWLA | 0.5 | (9.0 GiB) |" in text
  assert "| SWLA | 64 | 128 |" in text
  assert figure.stat().st_size > 1000
  lines = [json.loads(line) for line in out.read_text().splitlines()]
  lines[0]["commit"] = "another"
  out.write_text("".join(json.dumps(line) + "\n" for line in lines))
  with pytest.raises(SystemExit, match="of another commit"):
    throughput.main(flags)


def test_the_figure_is_of_what_was_timed(monkeypatch, tmp_path):
  drawn = []
  record = {"model": "linear", "tokens": 2048, "mode": "train", "cpu_ms": 4.0}
  left = record | {"tokens": 4096, "left_out": "9.0 GiB"}
  del left["cpu_ms"]
  plot = throughput_figure.plt.Axes.plot
  monkeypatch.setattr(
    throughput_figure.plt.Axes,
    "plot",
    lambda axes, x, y, *rest, **options: (
      drawn.append((x, y)) or plot(axes, x, y, *rest, **options)
    ),
  )
  throughput_figure.draw(
    [{"record": "machine"}, record, left], tmp_path / "a.png"
  )
  assert drawn == [((2048,), (512e3,))]
  assert "<!-- throughput -->\n" in readme.README.read_text()
