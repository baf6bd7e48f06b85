"""Two processes train together, one is killed in the middle of a save."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs.lm import transformer_tiny
from examples.checkpoints import Checkpoints
from examples.lm import sharding
from examples.lm.settings import MeshSettings, Settings

ROOT = pathlib.Path(__file__).parents[2]

# Dies, as by `kill -9`, when all of a step is written and only the rename that
# makes it count is left.
WORKER = """
import os, pathlib, runpy, signal, sys

fatal = os.environ.get("DIE_BEFORE_RENAMING_TO")

def guarded(rename):
  def wrapper(*arguments, **options):
    if fatal and any(str(a).rstrip("/") == fatal for a in arguments):
      os.kill(os.getpid(), signal.SIGKILL)
    return rename(*arguments, **options)
  return wrapper

os.rename, os.replace = guarded(os.rename), guarded(os.replace)
pathlib.Path.rename = guarded(pathlib.Path.rename)
pathlib.Path.replace = guarded(pathlib.Path.replace)
runpy.run_module("examples.lm.main", run_name="__main__", alter_sys=True)
"""

OPTIONS = {
  "model.dim": 16,
  "model.num_layers": 1,
  "model.hidden_dim": 32,
  "data.held_out": 5,
  "steps": 6,
  "length": 32,
  "batch_size": 4,
  "save_every": 2,
  "log_every": 1,
  "mesh.fsdp": 2,
  "mesh.data": 2,
}


def start(folder, workdir, fatal=None):
  """Both processes of a run, with two devices each."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  environment = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "DIE_BEFORE_RENAMING_TO": str(fatal or ""),
  }
  arguments = [
    f"--config={ROOT}/configs/lm/transformer_tiny.py",
    f"--workdir={workdir}",
    f"--config.data.path={folder}/texts.jsonl",
    *(f"--config.{name}={value}" for name, value in OPTIONS.items()),
    "--distributed",
    f"--coordinator=127.0.0.1:{port}",
    "--processes=2",
  ]
  return [
    subprocess.Popen(
      [sys.executable, "-c", WORKER, *arguments, f"--process={i}"],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i in range(2)
  ]


def finish(processes):
  outputs = [process.communicate(timeout=200)[0] for process in processes]
  codes = [process.returncode for process in processes]
  assert codes == [0, 0], "\n".join(outputs)[-4000:]
  return outputs[0]


def log(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  entries = [json.loads(line) for line in lines]
  for entry in entries:
    entry.pop("tokens_per_second", None)
  return entries


def saved(workdir):
  """Arrays of the newest state, and notes, loaded by one process."""
  config = transformer_tiny.get_config()
  config.update_from_flattened_dict(OPTIONS)
  settings = Settings.from_config(config)
  mesh = sharding.make_mesh(MeshSettings(), jax.devices()[:1])
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    shapes = sharding.abstract_state(settings)
    layout = sharding.layout(settings, mesh)
  checkpoints = Checkpoints(workdir)
  state, notes = checkpoints.restore(sharding.on_mesh(shapes, layout.state))
  checkpoints.close()
  assert int(state.step) == OPTIONS["steps"]
  return jax.tree.leaves(state), notes


@pytest.mark.slow
def test_killed_in_a_save_and_restarted_equals_undisturbed(tmp_path):
  rng = np.random.default_rng(0)
  with (tmp_path / "texts.jsonl").open("w") as file:
    for size in rng.integers(5, 90, size=40):
      text = "".join(rng.choice(["the ", "heart ", "of "], size=size))
      file.write(json.dumps({"text": text}) + "\n")
  undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

  processes = start(tmp_path, killed, fatal=killed / "checkpoints" / "4")
  try:
    first = processes[0].communicate(timeout=200)[0]
    assert processes[0].returncode == -signal.SIGKILL, first[-4000:]
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  names = {path.name for path in (killed / "checkpoints").iterdir()}
  assert "2" in names
  assert "4" not in names
  assert any(name.startswith("4.") for name in names)

  output = " ".join(finish(start(tmp_path, killed)).split())
  assert "checkpoint 4 was left half-written" in output
  assert "going on after step 2" in output
  finish(start(tmp_path, undisturbed))
  assert log(killed) == log(undisturbed)
  got, expected = saved(killed), saved(undisturbed)
  assert got[1] == expected[1]
  for a, b in zip(got[0], expected[0], strict=True):
    np.testing.assert_array_equal(a, b)
