"""A decode step that is exported, and called where there is only jax."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import Cached, Constant, SparseSelective
from memcache_jax.decoding import export_step
from memcache_jax.memories import DecayedLinear, Titans
from memcache_jax.models import (
  AttentionSpec,
  LanguageModel,
  MemorySpec,
  ModelConfig,
)
from memcache_jax.ops.mlp_memory import MLP
from tests.layers.cases import fast_to_compile, louder

# A number of rows that is a symbol is no int, as run-time types want.
pytestmark = pytest.mark.usefixtures("as_a_user")

VOCAB, ROOM, TOKENS = 13, 24, 10

# Run where memcache_jax is not to be found.
SERVER = """
import sys
import jax, numpy as np
files = np.load("arrays.npz")
arrays = lambda name: [files[f"{name}_{i}"] for i in range(files[name])]
exported = jax.export.deserialize(bytearray(open("step", "rb").read()))
step = jax.jit(exported.call, donate_argnums=2)
weights, state = arrays("weights"), arrays("state")
state = [np.repeat(x, 3, axis=0) for x in state]
logits = []
for tokens in files["text"].T:
  row, state = step(weights, tokens, state)
  logits.append(row)
np.save("logits.npy", np.stack(logits, axis=1))
assert "memcache_jax" not in sys.modules
"""


def _model(memory, dim=8):
  config = ModelConfig(
    vocab_size=VOCAB,
    dim=dim,
    num_layers=2,
    pattern=(MemorySpec(memory, 2), AttentionSpec(2, window=3)),
    hidden_dim=12,
  )
  return louder(LanguageModel(config, rngs=nnx.Rngs(0)))


@pytest.mark.slow
def test_a_fresh_process_without_this_library(tmp_path):
  memory = Cached(DecayedLinear.mamba2(), Constant(4), SparseSelective(top_k=1))
  model = _model(memory)
  data = export_step(model, ROOM).serialize()
  (tmp_path / "step").write_bytes(data)
  text = np.random.default_rng(0).integers(0, VOCAB, (3, TOKENS), np.int32)
  state = model.init_state(1, ROOM)
  arrays = {"text": text}
  for name, tree in (("weights", model), ("state", state)):
    leaves = jax.tree.leaves(tree)
    arrays |= {f"{name}_{i}": np.asarray(x) for i, x in enumerate(leaves)}
    arrays[name] = len(leaves)
  np.savez(tmp_path / "arrays.npz", **arrays)
  subprocess.run([sys.executable, "-c", SERVER], cwd=tmp_path, check=True)
  got = np.load(tmp_path / "logits.npy")
  whole, _ = fast_to_compile(model.__call__)(text)
  np.testing.assert_allclose(got, whole, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("memory", "dim"),
  [
    (Cached(Titans(MLP()), Constant(4)), 8),
    # Selected reads, of widths that kernels take.
    (Cached(Titans(MLP()), Constant(2), SparseSelective(top_k=1)), 64),
    (Cached(DecayedLinear(), Constant(2), SparseSelective(top_k=1)), 64),
  ],
)
def test_other_platforms(memory, dim):
  """From shapes alone; the batch is no number in any check on the way."""
  shapes = jax.eval_shape(lambda: _model(memory, dim))
  exported = export_step(shapes, ROOM, platforms=("cpu", "tpu", "cuda"))
  assert set(exported.platforms) == {"cpu", "tpu", "cuda"}
  assert str(exported.out_avals[0].shape) == f"(b, {VOCAB})"


def test_errors():
  model = _model(DecayedLinear())
  with pytest.raises(ValueError, match="`model` must be a LanguageModel"):
    export_step(model.embedding, ROOM)
  with pytest.raises(ValueError, match="`max_length` must be .* got 0"):
    export_step(model, 0)
  with pytest.raises(ValueError, match="`platforms` must .* got 'cpu'"):
    export_step(model, ROOM, platforms="cpu")
