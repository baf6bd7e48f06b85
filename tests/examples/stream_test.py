"""`examples.stream`: a text goes in, what follows comes out, for ever."""

import io
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from examples import functional, stream
from examples.lm import export
from examples.lm.model import model_config
from examples.lm.settings import ModelSettings, Settings
from examples.lm.tokenizers import ByteTokenizer
from examples.workdir import SETTINGS, InputError
from memcache_jax.caching import DropOldest
from memcache_jax.decoding import generate

pytestmark = pytest.mark.slow

TINY = ModelSettings(
  family="swla",
  caching="ssc",
  dim=16,
  num_layers=1,
  hidden_dim=32,
  segment_length=8,
)
TEXT = "the heart of the matter, \u00e9t\u00e9 after \u00e9t\u00e9.\n" * 12
FLAGS = ["--temperature=0", "--slots=3", "--tokens=20"]


@pytest.fixture
def folder(tmp_path):
  """A model as a finished run leaves it behind."""
  params = functional.initial_params(model_config(TINY), 0)
  params = jax.tree.map(lambda x: 3.0 * x, params)
  export.save(tmp_path, Settings(model=TINY), params)
  return tmp_path


def test_it_writes_what_the_model_generates(folder, monkeypatch, capsys):
  assert len(TEXT) > stream.BLOCK
  monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
  stream.main([f"--model={folder}", *FLAGS])
  got = capsys.readouterr().out
  (folder / "text").write_text(TEXT)
  stream.main([str(folder / "text"), f"--model={folder}", *FLAGS])
  assert capsys.readouterr().out == got
  model, tokenizer = export.load(folder)
  model = stream.endless(model, DropOldest(3))
  prompt = [tokenizer.bos_id, *tokenizer.encode(TEXT)]
  (ids,) = generate(model, [prompt], max_new_tokens=20, temperature=0)
  assert len(set(ids)) > 1  # or the test shows little
  said = "".join(stream.texts(tokenizer, ids))
  assert got == said
  state = model.init_state(1, 2**30)
  assert state[0].memory.index.shape == (1, 3)


def test_what_cannot_go_on_for_ever(tmp_path):
  settings = replace(TINY, family="transformer", caching="none")
  params = functional.initial_params(model_config(settings), 0)
  export.save(tmp_path, Settings(model=settings), params)
  with pytest.raises(SystemExit, match="full attention cannot"):
    stream.main([f"--model={tmp_path}"])


def test_what_is_no_model_or_text_is_one_clear_line(tmp_path):
  with pytest.raises(SystemExit, match="has it in its folder `model`"):
    stream.main([f"--model={tmp_path}"])
  (tmp_path / export.WEIGHTS).mkdir()
  for damaged in ("{", "{}"):
    (tmp_path / SETTINGS).write_text(damaged)
    with pytest.raises(SystemExit, match="json is not what was exported"):
      stream.main([f"--model={tmp_path}"])
  ids = lambda data: stream.token_ids(
    ByteTokenizer(), io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
  )
  with pytest.raises(InputError, match="not one, of utf-8"):
    list(ids(b"\x93\xff"))
  with pytest.raises(InputError, match="the text is empty"):
    list(ids(b""))


def test_characters_come_whole():
  tokenizer = ByteTokenizer()
  text = "a\u00e9\U0001f600 b" * 5
  pieces = list(stream.texts(tokenizer, tokenizer.encode(text).tolist()))
  assert "".join(pieces) == text
  assert len(pieces) == len(text)
  # What never becomes a character does not stop the rest.
  ids = itertools.chain([0x80] * 9, b"end")
  assert "".join(stream.texts(tokenizer, ids)).endswith("end")
  file = io.StringIO(text)
  ids = list(stream.token_ids(tokenizer, file))
  np.testing.assert_array_equal(ids[1:], tokenizer.encode(text))
