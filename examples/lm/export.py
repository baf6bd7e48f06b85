"""The model of a finished run: a folder that stands alone, and its loading."""

import json
import pathlib
from dataclasses import asdict

import jax
import orbax.checkpoint as ocp
from flax import nnx
from ml_collections import ConfigDict

from examples import functional
from examples.lm import tokenizers
from examples.lm.model import model_config
from examples.lm.settings import Settings
from examples.workdir import SETTINGS, InputError
from memcache_jax.models import LanguageModel

WEIGHTS = "weights"


def save(folder: pathlib.Path, settings: Settings, params: nnx.State) -> None:
  """Writes a model, in place of one that is there; every process calls it."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder.absolute() / WEIGHTS, params, force=True)
  if jax.process_index() == 0:
    text = json.dumps(asdict(settings), indent=2)
    (folder / SETTINGS).write_text(text + "\n")


def load(
  folder: pathlib.Path,
) -> tuple[LanguageModel, tokenizers.Tokenizer]:
  """What `save` wrote: a model on one device, and its tokenizer.

  Raises:
    InputError: for a folder that holds none, or other settings.
  """
  file = folder / SETTINGS
  if not (folder / WEIGHTS).is_dir() or not file.is_file():
    raise InputError(
      f"{folder} holds no exported model; a run has it in its folder `model`"
    )
  try:
    settings = Settings.from_config(ConfigDict(json.loads(file.read_text())))
  except (KeyError, TypeError, ValueError) as error:
    raise InputError(f"{file} is not what was exported: {error!r}") from error
  config = model_config(settings.model)
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
    nnx.state(functional.abstract(config)),
  )
  with ocp.StandardCheckpointer() as checkpointer:
    params = checkpointer.restore(folder.absolute() / WEIGHTS, like)
  model = functional.with_params(config, params)
  return model, tokenizers.load(settings.data.tokenizer)
