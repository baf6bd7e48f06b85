"""The quickstart: its numbers, its errors, and that stopping costs nothing."""

import json
import lzma
import math
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from examples.quickstart import (
  data,
  evaluation,
  ngram,
  plots,
  session,
  training,
)
from examples.quickstart.main import main
from examples.quickstart.settings import Settings
from examples.workdir import InputError

# One process, as the tests share a run.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("quickstart")]

ROOT = pathlib.Path(__file__).parents[2]
TINY = Settings(
  text_sha256="tiny",
  steps=6,
  batch_size=2,
  window=32,
  dim=16,
  num_layers=1,
  num_heads=2,
  hidden_dim=32,
  segment_length=8,
)


def as_bytes(text: str) -> np.ndarray:
  return np.frombuffer(text.encode(), np.uint8)


@pytest.fixture(scope="module")
def novels() -> bytes:
  return lzma.decompress(data.EMBEDDED.read_bytes())


# N-grams.


def test_ngrams_equal_hand_worked_numbers():
  train = as_bytes("abab")
  # Two kinds of bytes, each twice: (N + T / 256) / (4 + 2).
  known, unknown = (2 + 2 / 256) / 6, (2 / 256) / 6
  p = ngram.probabilities(train, as_bytes("aab"), 0)
  np.testing.assert_allclose(p, [known] * 3)
  # After a came b, twice; after b came a, once.
  p = ngram.probabilities(train, as_bytes("abcaba"), 1)
  b_after_a, a_after_b = (2 + known) / 3, (1 + known) / 2
  c_after_b = unknown / 2
  np.testing.assert_allclose(
    p, [known, b_after_a, c_after_b, known, b_after_a, a_after_b]
  )
  bits = ngram.bits_per_byte(train, as_bytes("aba"), 1)
  assert bits == pytest.approx(-math.log2(b_after_a * a_after_b) / 2)


@pytest.mark.parametrize("context", ["he", "zq", "qu"])
def test_ngrams_are_distributions(context):
  train = as_bytes("the queen of the hearts, she made some tarts " * 3)
  last = [
    ngram.probabilities(train, np.append(as_bytes(context), byte), 2)[-1]
    for byte in np.arange(256, dtype=np.uint8)
  ]
  assert sum(last) == pytest.approx(1.0)


def test_ngrams_of_the_novels_equal_known_numbers(novels):
  text = np.frombuffer(novels, np.uint8)
  cut = int(len(text) * 0.95)
  bits = [
    -np.log2(ngram.probabilities(text[:cut], text[cut:], order)).mean()
    for order in range(4)
  ]
  np.testing.assert_allclose(bits, [4.461, 3.547, 2.769, 2.164], atol=5e-4)


# Data.


def test_the_held_out_part_is_one_whole_novel(novels):
  corpus = data.load(None)
  train, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
  assert held_out.startswith(b"Persuasion\n\n\nby\n\nJane Austen\n\n(1818)")
  assert held_out.endswith(b"national importance.\n\n\n\nFinis\n")
  before, after = novels.split(held_out)
  assert train == before + after
  assert b"Wentworth" in held_out
  assert b"Wentworth" not in train


@pytest.mark.parametrize("fault", ["EMMA\n", ""])
def test_novels_are_not_cut_at_uncertain_places(novels, fault):
  broken = fault.encode() + novels.removeprefix(b"EMMA\n" if not fault else b"")
  with pytest.raises(InputError, match="'EMMA', expected one"):
    data.split_novels(broken)


def test_a_damaged_embedded_text_is_noticed(tmp_path, monkeypatch):
  path = tmp_path / "text.xz"
  monkeypatch.setattr(data, "EMBEDDED", path)
  for content, message in [
    (None, "cannot read"),
    (b"not xz", "cannot read"),
    (lzma.compress(b"EMMA"), "is damaged"),
  ]:
    if content is not None:
      path.write_bytes(content)
    with pytest.raises(InputError, match=message):
      data.load(None)


def test_windows_have_every_byte_as_target_once():
  text = np.arange(200, dtype=np.uint8)
  windows = np.stack(list(data.ByteWindows(text, 33)))
  assert windows.shape == (6, 34)
  np.testing.assert_array_equal(windows[:, 1:].ravel(), text[1:199])
  np.testing.assert_array_equal(windows[:, 0], text[:198:33])


def test_batches_hold_every_window_once_per_pass_and_can_be_resumed():
  text = np.arange(241, dtype=np.uint8)
  firsts = lambda batches: [int(x) for x in np.stack(batches)[..., 0].ravel()]
  batches = data.training_batches(text, length=10, batch_size=4, seed=1)
  first, second = ([next(batches) for _ in range(6)] for _ in range(2))
  assert sorted(firsts(first)) == sorted(firsts(second))
  assert sorted(firsts(first)) == list(range(0, 240, 10))
  assert firsts(first) != firsts(second)

  state = batches.get_state()
  expected = next(batches)
  other = data.training_batches(text, length=10, batch_size=4, seed=1)
  other.set_state(state)
  np.testing.assert_array_equal(next(other), expected)


# Wrong input.


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--text", "absent.txt"], "No such file"),
    (["--text", "folder"], "Is a directory"),
    (["--text", "empty.txt"], "too short: 0 bytes"),
    (["--text", "tiny.txt"], "too short: 5 bytes"),
    (["--text", "zeros.bin"], "not a text file"),
    (["--text", "latin1.txt"], "not a text file"),
    (["--text"], "expected one argument"),
    (["--step", "3"], "unrecognized arguments: --step 3"),
    (["extra"], "unrecognized arguments: extra"),
    (["--steps", "0"], "--steps: must be an integer from 1"),
    (["--steps", "many"], "got 'many'"),
    (["--seed", "-1"], "--seed: must be an integer from 0"),
    (["--prompt", ""], "--prompt: must not be empty"),
    (["--workdir", "folder"], "not empty and holds no run"),
    (["--workdir", "tiny.txt"], "cannot use tiny.txt: "),
    (["--workdir", "broken"], "settings.json is damaged"),
  ],
)
def test_wrong_input_gives_one_line(
  arguments, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  for name, content in {
    "empty.txt": b"",
    "tiny.txt": b"short",
    "zeros.bin": bytes(data.MIN_BYTES),
    "latin1.txt": b"caf\xe9 " * data.MIN_BYTES,
    "folder/precious.txt": b"mine",
    "broken/settings.json": b"{",
  }.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
  before = sorted(tmp_path.rglob("*"))
  assert main(arguments) == session.WRONG_INPUT
  output, error = capsys.readouterr()
  assert error.startswith("error: ")
  assert error.endswith("\n")
  assert error.count("\n") == 1
  assert message in error
  assert not output
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_the_command_line_exits_with_one_line_and_a_code(tmp_path):
  result = subprocess.run(
    [sys.executable, "-m", "examples.quickstart", "--text", "absent.txt"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 2
  assert result.stdout == ""
  assert result.stderr.startswith("error: cannot read absent.txt")
  assert result.stderr.count("\n") == 1


# Runs.


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
  words = ["the ", "heart ", "of ", "a ", "reader.\n"]
  order = np.random.default_rng(0).integers(len(words), size=4_000)
  text = as_bytes("".join(words[i] for i in order))
  return data.Corpus(text[:-5_000], text[-5_000:], "an end", "tiny")


def run(corpus, workdir, settings=TINY) -> int:
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    return session.run(settings, corpus, workdir, prompt="the ")


def results(workdir: pathlib.Path) -> dict:
  return json.loads((workdir / "results.json").read_text())


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> pathlib.Path:
  """The folder of a run that nothing interrupted."""
  workdir = tmp_path_factory.mktemp("runs") / "finished"
  assert run(corpus, workdir) == session.OK
  return workdir


class TrainStep:
  """The real step, which counts, and can press Ctrl-C in one."""

  def __init__(self, interrupt_at: int | None = None):
    self._step = training.train_step
    self._interrupt_at = interrupt_at
    self.calls = 0

  def __call__(self, *arguments):
    self.calls += 1
    if self.calls == self._interrupt_at:
      signal.raise_signal(signal.SIGINT)
    return self._step(*arguments)


def test_a_run_leaves_all_it_promises(corpus, finished):
  found = results(finished)
  assert len(found["losses"]) == TINY.steps
  assert found["losses"][-1] < found["losses"][0]
  assert [step for step, _ in found["probes"]] == list(range(1, 7))
  # The held-out text is shorter than what a probe measures at most.
  assert found["probes"][-1][1] == found["held_out_bits_per_byte"]
  assert 0 < found["held_out_bits_per_byte"] < 8.5
  assert max(found["streaming_errors"].values()) < 1e-4
  assert list(found["references"]) == [
    f"n-gram of order {o}" for o in (1, 2, 3)
  ]
  for name in ("loss.png", "segment_gates.png"):
    assert (finished / name).read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_goes_on_with_equal_numbers(
  corpus, finished, tmp_path, monkeypatch, capfd
):
  workdir = tmp_path / "run"
  step = TrainStep(interrupt_at=3)
  monkeypatch.setattr(training, "train_step", step)
  assert run(corpus, workdir) == session.INTERRUPTED
  assert step.calls == 3
  assert "step 3 of 6 is saved" in capfd.readouterr().out.replace("\n", " ")
  assert not (workdir / "results.json").exists()

  assert run(corpus, workdir) == session.OK
  assert "Resuming after step 3." in capfd.readouterr().out
  assert step.calls == 6
  expected, got = results(finished), results(workdir)
  for name in ("losses", "probes", "held_out_bits_per_byte"):
    assert got[name] == expected[name]


def test_a_finished_run_is_not_trained_again(corpus, finished, monkeypatch):
  before = results(finished)
  step = TrainStep()
  monkeypatch.setattr(training, "train_step", step)
  assert run(corpus, finished) == session.OK
  assert step.calls == 0
  assert results(finished) == before


def test_a_run_of_other_settings_is_left_alone(corpus, finished):
  other = Settings(**{**vars(TINY), "steps": 7, "seed": 1})
  changed = lambda: {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
  before = changed()
  with pytest.raises(
    InputError, match=r"seed 0 \(now 1\), steps 6 \(now 7\): choose another"
  ):
    run(corpus, finished, other)
  assert changed() == before


def test_broken_checkpoints_are_passed_over(
  corpus, finished, tmp_path, monkeypatch, capfd
):
  workdir = tmp_path / "run"
  step = TrainStep(interrupt_at=4)
  monkeypatch.setattr(training, "train_step", step)
  assert run(corpus, workdir) == session.INTERRUPTED
  saved = workdir / "checkpoints"
  assert {path.name for path in saved.iterdir()} == {"3", "4"}
  # Step 4 loses its arrays; step 5 was being written when the power went.
  for path in (saved / "4" / "state").rglob("*"):
    if path.is_file():
      path.unlink()
  (saved / "5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)

  assert run(corpus, workdir) == session.OK
  output = capfd.readouterr().out.replace("\n", " ")
  assert "checkpoint 4 cannot be read" in output
  assert "Resuming after step 3." in output
  assert (workdir / "damaged" / "4").is_dir()
  assert results(workdir)["losses"] == results(finished)["losses"]


def test_a_failed_proof_fails_the_run(corpus, finished, monkeypatch, capfd):
  monkeypatch.setattr(evaluation, "streaming_error", lambda *_: 0.01)
  assert run(corpus, finished) == session.PROOF_FAILED
  assert "DIFFERS FROM" in capfd.readouterr().out


def test_gates_are_drawn_at_their_segments_as_multiples_of_equal_shares():
  nan = np.nan
  # Bytes 0 and 1 are in segment 0, byte 2 is in segment 1.
  weights = np.array([[0, 0, 1], [0, 0, 1], [0.25, 0, 0.75]])
  np.testing.assert_allclose(
    plots.relative_shares(weights, 2), [[1, nan], [1, nan], [0.5, 1.5]]
  )
  weights = np.array([[0, 0, 1], [0.5, 0, 0.5], [0.5, 0.25, 0.25]])
  np.testing.assert_allclose(
    plots.relative_shares(weights, 1),
    [[1, nan, nan], [1, 1, nan], [1.5, 0.75, 0.75]],
  )
