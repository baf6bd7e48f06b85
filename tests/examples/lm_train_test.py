"""Training of `examples.lm`: its configs, one step, and going on."""

import functools
import importlib
import json
import os
import pathlib
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from examples import functional
from examples.checkpoints import Checkpoints
from examples.interrupt import Interrupt
from examples.lm import export, sharding, train, training, utilization
from examples.lm.model import model_config
from examples.lm.packing import Batch
from examples.lm.settings import (
  DataSettings,
  MeshSettings,
  ModelSettings,
  OptimizerSettings,
  Settings,
)
from examples.train_state import adamw, schedule
from examples.workdir import InputError
from memcache_jax.layers import NoDecayParam
from memcache_jax.testing import assert_close

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "lm").glob("[a-z]*_*.py"))
# Configs with which something was trained; see configs/README.md.
RUN = {
  f"{name}_tiny"
  for name in (
    "transformer",
    "samba",
    "retnet",
    "deltanet",
    "rwkv7",
    "swla_grm",
  )
}
TINY = Settings(
  model=ModelSettings(
    family="transformer",
    caching="none",
    dim=16,
    num_layers=1,
    hidden_dim=32,
    segment_length=8,
    inner_batch=8,
  ),
  data=DataSettings(path="texts.jsonl", held_out=5, align=8),
  steps=6,
  batch_size=2,
  length=32,
  log_every=1,
  save_every=2,
  keep=3,
  evaluation_batches=2,
  watch_tokens=8,
  profile_steps=1,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
  """A folder with something to train on, as the working directory."""
  rng = np.random.default_rng(0)
  with (tmp_path / "texts.jsonl").open("w") as file:
    for size in rng.integers(5, 90, size=40):
      text = "".join(rng.choice(["the ", "heart ", "of "], size=size))
      file.write(json.dumps({"text": text}) + "\n")
  monkeypatch.chdir(tmp_path)
  return tmp_path


def run(settings, name="run", interrupt=None) -> train.Result:
  console = Console(highlight=False, width=200)
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    return train.run(settings, pathlib.Path(name), console, interrupt)


def log(name="run") -> list[dict]:
  lines = pathlib.Path(name, "metrics.jsonl").read_text().splitlines()
  entries = [json.loads(line) for line in lines]
  for entry in entries:
    entry.pop("tokens_per_second", None)
    entry.pop("utilization", None)
  return entries


# Configs.


def test_every_config_has_the_parameters_it_says():
  assert len(CONFIGS) == 69
  for path in CONFIGS:
    module = importlib.import_module(f"configs.lm.{path.stem}")
    settings = Settings.from_config(module.get_config())
    text = path.read_text()
    said = re.search(r"([\d,]+) parameters", text)[1]
    leaves = jax.tree.leaves(
      nnx.state(functional.abstract(model_config(settings.model)))
    )
    assert said == f"{sum(leaf.size for leaf in leaves):,}", path.name
    assert f"--config=configs/lm/{path.name} " in text
    assert ("Not yet run." in text) == (path.stem not in RUN)


def test_wrong_models():
  with pytest.raises(InputError, match="family must be .* got 'lstm'"):
    model_config(ModelSettings(family="lstm"))
  with pytest.raises(InputError, match="none with samba: got 'grm'"):
    model_config(ModelSettings(family="samba"))
  with pytest.raises(InputError, match="caching must be .* got 'all'"):
    model_config(ModelSettings(caching="all"))
  with pytest.raises(InputError, match="write_mode must be .* got 'x'"):
    model_config(ModelSettings(write_mode="x"))


# Sharding.


def test_wrong_meshes():
  with pytest.raises(InputError, match="does not fit 1 devices"):
    sharding.make_mesh(MeshSettings(fsdp=2), jax.devices()[:1])
  slices = [SimpleNamespace(platform="tpu", slice_index=i) for i in range(2)]
  with pytest.raises(InputError, match="chips of one slice: got 2"):
    sharding.make_mesh(MeshSettings(), slices)
  mesh = sharding.make_mesh(MeshSettings(), jax.devices()[:1])
  assert dict(mesh.shape) == {
    "data": 1,
    "fsdp": 1,
    "tensor": 1,
    "sequence": 1,
  }


# One step.


def test_parts_of_a_batch_give_the_gradient_of_the_whole():
  rng = np.random.default_rng(0)
  shape = (4, 16)
  batch = Batch(
    jnp.asarray(rng.integers(250, size=shape), jnp.int32),
    jnp.asarray(rng.integers(250, size=shape), jnp.int32),
    # Rows with very different numbers of tokens.
    jnp.arange(16)[None] < jnp.array([16, 1, 3, 9])[:, None],
    jnp.arange(16)[None] + jnp.zeros((4, 1), int) == 0,
  )
  options = OptimizerSettings(z_loss=1e-2)
  whole = replace(TINY, optimizer=options, batch_size=4)
  parts = replace(whole, optimizer=replace(options, accumulate=2))
  params = functional.initial_params(model_config(TINY.model), 0)
  got, expected = (
    jax.jit(lambda p, b, s=s: training.gradient(s, p, b))(params, batch)
    for s in (parts, whole)
  )
  assert int(expected[2]) == 29
  assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), 1e-5)


def test_large_gradients_are_clipped_and_only_weights_decay():
  params = nnx.State(
    {"w": nnx.Param(jnp.ones(4)), "b": NoDecayParam(jnp.ones(()))}
  )
  rate = 0.5

  def updates(*sizes):
    optimizer = adamw(lambda _: rate, weight_decay=0.1)
    state, update = optimizer.init(params), None
    for size in sizes:
      grads = jax.tree.map(lambda x, s=size: jnp.full_like(x, s), params)
      update, state = optimizer.update(grads, state, params)
    return update

  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    # Adam's second step shows how large the first gradient was: 5 numbers of
    # 5 ** -0.5 have a norm of 1.
    clipped, expected = updates(100.0, 0.01), updates(5**-0.5, 0.01)
    other, still = updates(0.1, 0.01), updates(0.0)
  chex.assert_trees_all_close(clipped, expected, rtol=1e-5)
  assert abs(other["w"][0] - expected["w"][0]) > 1e-2
  np.testing.assert_allclose(still["w"][...], -rate * 0.1, rtol=1e-6)
  assert still["b"][...] == 0


def test_the_learning_rate_rises_then_falls_along_a_cosine():
  rate = schedule(2.0, steps=10, warmup=4, final_fraction=0.1)
  rates = [rate(step) for step in (0, 2, 4, 7, 10)]
  np.testing.assert_allclose(rates, [0, 1, 2, 1.1, 0.2], rtol=1e-6)


def test_memories_are_watched():
  model = replace(TINY.model, family="dla", caching="grm")
  settings = replace(TINY, model=model, watch_tokens=20)
  batch = Batch.empty(2, 32)
  batch.tokens[:] = np.random.default_rng(0).integers(250, size=(2, 32))
  batch.mask[:, :20] = True
  batch.mask[1, 8:] = False
  params = functional.initial_params(model_config(model), 0)
  scalars = jax.jit(
    lambda params, batch: training.watch(settings, params, batch)
  )(params, batch)
  assert set(scalars) == {"inner_loss", "state_norm", "gate_entropy"}
  chex.assert_tree_all_finite(scalars)
  assert scalars["state_norm"] > 0
  # Gates start nearly equal: of one, two and three memories.
  entropy = (8 * np.log(2) + 4 * np.log(3)) / 28
  np.testing.assert_allclose(scalars["gate_entropy"], entropy, rtol=1e-2)
  # Where nothing is cached there is none.
  few = replace(settings, watch_tokens=4)
  watch = functools.partial(training.watch, few)
  assert "gate_entropy" not in jax.eval_shape(watch, params, batch)


def test_utilization_needs_a_known_peak(monkeypatch):
  device = jax.devices()[0]
  assert utilization.peak([device]) is None
  monkeypatch.setitem(utilization.PEAKS, device.device_kind, 1e9)
  assert utilization.peak([device, device]) == 2e9
  assert utilization.model_flops(10, 7.0) == 420


# One of every family of models.
FAMILIES = [
  "transformer",
  "samba",
  "retnet",
  "deltanet",
  "rwkv7",
  "memora",
  "swla_grm",
  "dla_grm",
  "titans_mac",
  "titans_mag",
  "titans_mal",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_configs_learn(name):
  module = importlib.import_module(f"configs.lm.{name}_tiny")
  settings = Settings.from_config(module.get_config())
  settings = replace(
    settings,
    model=replace(settings.model, dim=32, hidden_dim=32),
    optimizer=OptimizerSettings(peak=1e-2, warmup=2),
    steps=20,
    length=64,
    batch_size=2,
  )
  text = (ROOT / "LICENSE").read_bytes()[1000:1130]
  ids = np.int32(np.frombuffer(text, np.uint8).reshape(2, 65))
  starts = np.arange(64)[None] % 32 == np.zeros((2, 1), int)
  batch = Batch(ids[:, :-1], ids[:, 1:], np.ones((2, 64), bool), starts)

  @functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
  )
  def train(batch):
    step = lambda state, _: training.train_step(settings, state, batch)
    state = training.initial_state(settings)
    return jax.lax.scan(step, state, length=settings.steps)[1].loss

  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    losses = np.asarray(train(batch))
  assert losses[-1] < losses[0] - 1.0, losses


# Runs, of one program: they share a process.

runs = pytest.mark.xdist_group("lm_runs")
FIRST_LOSS, FIRST_NORM = 5.5612, 1.7315


@runs
def test_a_stopped_run_goes_on_with_equal_numbers(here, monkeypatch, capsys):
  with monkeypatch.context() as patch:
    patch.setitem(utilization.PEAKS, jax.devices()[0].device_kind, 1e12)
    whole = run(TINY, "whole")
  lines = pathlib.Path("whole", "metrics.jsonl").read_text().splitlines()
  assert all(0 < json.loads(x)["utilization"] < 1 for x in lines[:-1])
  assert all(json.loads(x)["tokens_per_second"] > 0 for x in lines[:-1])
  assert list(pathlib.Path("whole", "profile").rglob("*.xplane.pb"))
  assert list(pathlib.Path("whole", "tensorboard").glob("events.*"))
  losses = [entry["loss"] for entry in log("whole")[:-1]]
  assert [entry["step"] for entry in log("whole")] == [1, 2, 3, 4, 5, 6, 6]
  assert losses[-1] < losses[0]
  assert log("whole")[-1]["held_out_loss"] == whole.held_out_loss
  first = losses[0], log("whole")[0]["gradient_norm"]
  assert first == pytest.approx((FIRST_LOSS, FIRST_NORM), abs=2e-4), (
    "The first step gives another loss or gradient. If model or data were "
    "meant to change, set FIRST_LOSS and FIRST_NORM to the new ones."
  )

  # Steps 2 and 4 are saved, then step 5 by Ctrl-C; then both are damaged.
  interrupt = Interrupt()
  add = train._Recorder.add

  def press(self, step, *arguments):
    interrupt.requested = step == 5
    return add(self, step, *arguments)

  monkeypatch.setattr(train._Recorder, "add", press)
  assert run(TINY, interrupt=interrupt).step == 5
  monkeypatch.undo()
  monkeypatch.chdir(here)
  saved = here / "run" / "checkpoints"
  assert {path.name for path in saved.iterdir()} == {"2", "4", "5"}
  arrays = [p for p in (saved / "5").rglob("*") if p.is_file()]
  max(arrays, key=lambda p: p.stat().st_size).unlink()
  (saved / "6.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
  capsys.readouterr()

  result = run(TINY)
  output = " ".join(capsys.readouterr().out.split())
  assert "nobody wrote down the peak of cpu" in output
  assert "checkpoint 6 was left half-written" in output
  assert "checkpoint 5 cannot be read" in output
  assert "going on after step 4" in output
  assert "embedding.table 264 16" in output
  assert log() == log("whole")
  for a, b in zip(
    jax.tree.leaves(result.state), jax.tree.leaves(whole.state), strict=True
  ):
    np.testing.assert_array_equal(a, b)

  # What is left behind can be loaded alone.
  model, tokenizer = export.load(here / "run" / "model")
  assert tokenizer.vocab_size == 258
  for a, b in zip(
    jax.tree.leaves(nnx.state(model)),
    jax.tree.leaves(whole.state.params),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)

  # Other settings are another run; the mesh is not one of them.
  with pytest.raises(InputError, match=r"seed 0 \(now 1\): choose another"):
    run(replace(TINY, seed=1))
  assert TINY.identity() == replace(TINY, mesh=MeshSettings(2)).identity()


@runs
def test_a_loss_that_is_not_finite_stops_the_run(here, monkeypatch):
  initial = sharding.initial_state

  def spoiled(*arguments):
    state = initial(*arguments)
    return replace(state, params=jax.tree.map(lambda x: x * 1e38, state.params))

  monkeypatch.setattr(sharding, "initial_state", spoiled)
  with pytest.raises(train.TrainingError, match="step 1 is not finite") as e:
    run(TINY)
  with np.load(re.search(r"is in (\S+)", str(e.value))[1]) as batch:
    assert batch["tokens"].shape == (2, 32)
  assert not list((here / "run" / "checkpoints").glob("2*"))


@runs
def test_a_run_whose_save_fails_stops(here, monkeypatch):
  rename = os.rename

  def full(source, target):
    if pathlib.Path(target) == here / "run" / "checkpoints" / "2":
      raise OSError("No space left on device")
    rename(source, target)

  monkeypatch.setattr(os, "rename", full)
  with pytest.raises(OSError, match="No space left on device"):
    run(TINY)
  assert log()[-1]["step"] <= 4  # at the next save at the latest
  assert not (here / "run" / "model").exists()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"watch_tokens": -1}, "watch_tokens must be at least 0: got -1"),
    ({"data": replace(TINY.data, path="x.txt")}, "no file matches x.txt"),
    ({"mesh": MeshSettings(data=9)}, "does not fit 1 devices"),
    ({"batch_size": 64}, "needs 64 documents: there are 32"),
  ],
)
def test_wrong_input_leaves_nothing_behind(here, options, message):
  with pytest.raises(InputError, match=message):
    run(replace(TINY, **options))
  assert not (here / "run").exists()


# Checkpoints.


def like():
  return {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}


def test_waiting_for_a_slow_disk_is_said(tmp_path, monkeypatch):
  """And the slow checkpoint is whole all the same."""
  rename, go_on = os.rename, threading.Event()

  def slow(source, target):
    if pathlib.Path(target) == tmp_path / "checkpoints" / "1":
      assert go_on.wait(60)
    rename(source, target)

  def say(line):
    said.append(line)
    go_on.set()

  monkeypatch.setattr(os, "rename", slow)
  said = []
  checkpoints = Checkpoints(tmp_path, say, background=True)
  for step in (1, 2):
    checkpoints.save(step, {"x": jnp.full(3, float(step))}, {"step": step})
  checkpoints.close()
  assert said == ["step 2 waits for checkpoint 1 to be saved"]
  names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert {"1", "2"} <= names


def test_a_step_without_its_mark_is_passed_over_or_whole(tmp_path):
  said = []
  checkpoints = Checkpoints(tmp_path, said.append)
  for step in (1, 2):
    checkpoints.save(step, {"x": jnp.full(3, float(step))}, {"step": step})
  checkpoints.close()
  for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
    (tmp_path / "checkpoints" / "2" / name).unlink(missing_ok=True)
  checkpoints = Checkpoints(tmp_path, said.append)
  state, notes = checkpoints.restore(like())
  checkpoints.close()
  step = notes["step"]
  np.testing.assert_array_equal(state["x"], np.full(3, float(step)))
  assert step == 2 or said


def test_nothing_saved_is_nothing_restored(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.restore(like()) is None
  checkpoints.close()
