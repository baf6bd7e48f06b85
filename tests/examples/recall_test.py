"""The recall example trains, measures, and writes its results down."""

import importlib
import json
import pathlib
import typing

import jax
import pytest
from absl import app, flags
from absl.testing import flagsaver

from examples.recall import main, model
from examples.recall.settings import AggregateName, MemoryName, Settings

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(
  path.stem
  for path in (ROOT / "configs" / "mqar").glob("*.py")
  if path.stem != "__init__"
)


# ml_collections loads config files in a way that Python has deprecated.
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@flagsaver.flagsaver()
def test_the_command_runs(tmp_path, capsys):
  out = tmp_path / "results.json"
  config = ROOT / "configs" / "mqar" / "tiny.py"
  flags.FLAGS(["main", f"--config={config}", f"--out={out}"])
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    main.main(["main"])
  assert "over 2 seeds" in capsys.readouterr().out
  results = json.loads(out.read_text())
  assert [run["seed"] for run in results["runs"]] == [0, 1]
  assert all(0 <= run["accuracy"] <= 1 for run in results["runs"])
  assert results["settings"]["memory"] == "linear"


# As above.
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@flagsaver.flagsaver()
def test_an_unknown_memory_is_one_clear_line(tmp_path):
  config = tmp_path / "wrong.py"
  config.write_text(
    "from configs.mqar import tiny\n\n\n"
    "def get_config():\n"
    "  config = tiny.get_config()\n"
    "  config.memory = 'foo'\n"
    "  return config\n"
  )
  flags.FLAGS(["main", f"--config={config}"])
  with pytest.raises(app.UsageError, match="`memory` must be one of .*'foo'"):
    main.main(["main"])


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_make_models_of_every_kind(name):
  module = importlib.import_module(f"configs.mqar.{name}")
  assert "Command:" in module.__doc__
  assert "Result:" in module.__doc__
  fields = dict(module.get_config())
  assert fields.pop("seeds")
  made = set()
  for memory in typing.get_args(MemoryName):
    for aggregate in typing.get_args(AggregateName):
      fields |= {"memory": memory, "aggregate": aggregate}
      settings = Settings(**fields)
      assert settings.task.length == fields["length"]
      if memory == "attention" and aggregate != "none":
        with pytest.raises(ValueError, match="must be 'none' for attention"):
          model.config(settings)
      else:
        made.add(model.config(settings).pattern)
  assert len(made) == 31  # no two of them are the same
  for name in ("memory", "aggregate"):
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*'typo'"):
      Settings(**fields | {name: "typo"})
