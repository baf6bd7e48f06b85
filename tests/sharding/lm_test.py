"""`examples.lm` over eight devices, and on fewer after a restart."""

import functools
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from examples.checkpoints import Checkpoints
from examples.lm import sharding, training
from examples.lm.packing import Batch
from examples.lm.settings import (
  DataSettings,
  MeshSettings,
  ModelSettings,
  OptimizerSettings,
  Settings,
)
from examples.workdir import InputError
from memcache_jax.testing import assert_close

SETTINGS = Settings(
  model=ModelSettings(
    family="swla",
    caching="grm",
    dim=32,
    num_layers=2,
    num_heads=2,
    hidden_dim=64,
    segment_length=8,
    inner_batch=4,
  ),
  data=DataSettings(align=8),
  # Large enough a step that a wrong gradient shows.
  optimizer=OptimizerSettings(peak=1e-2, warmup=1, accumulate=2),
  steps=3,
  batch_size=16,
  length=32,
)
MESHES = [
  (8, MeshSettings(fsdp=4, tensor=2)),
  (4, MeshSettings(fsdp=2, sequence=2)),
  (1, MeshSettings()),
  (8, MeshSettings(fsdp=4, sequence=2)),
]
# Meshes of the sessions of a run, one after the other.
SESSIONS = (0, 3, 1, 2)


def batch(seed):
  rng = np.random.default_rng(seed)
  shape = (SETTINGS.batch_size, SETTINGS.length)
  starts = np.zeros(shape, bool)
  starts[:, 8] = rng.random(len(starts)) < 0.5
  return Batch(
    rng.integers(250, size=shape).astype(np.int32),
    rng.integers(250, size=shape).astype(np.int32),
    rng.random(shape) < 0.9,
    starts,
  )


@functools.cache
def prepared(index):
  devices, mesh = MESHES[index]
  mesh = sharding.make_mesh(mesh, jax.devices()[:devices])
  layout = sharding.layout(SETTINGS, mesh)
  return layout, training.compiled(SETTINGS, layout)[0]


def step(index, state, seed):
  layout, train_step = prepared(index)
  rows = sharding.local_rows(layout.batch, SETTINGS.batch_size)
  data = sharding.global_batch(
    batch(seed), rows, SETTINGS.batch_size, layout.batch
  )
  with jax.set_mesh(layout.mesh):
    return train_step(state, data)


def test_memory_as_context_is_traced_over_rows_and_heads():
  """Under Explicit axes what does not fit together shows before compiling."""
  model = replace(SETTINGS.model, family="titans_mac", caching="none")
  settings = replace(SETTINGS, model=model)
  mesh = prepared(0)[0].mesh
  with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
    layout = sharding.layout(settings, mesh)
    state = sharding.on_mesh(sharding.abstract_state(settings), layout.state)
    rows = sharding.abstract_batch(settings)
    rows = sharding.on_mesh(rows, jax.tree.map(lambda _: layout.batch, rows))
    training.compiled(settings, layout)[1].trace(state.params, rows)


def test_eight_then_four_then_one_device_equal_one(tmp_path):
  with jax.numpy_dtype_promotion("standard"):  # optax needs it
    state = sharding.initial_state(SETTINGS, prepared(2)[0])
    expected = []
    for i in range(len(SESSIONS)):
      state, metrics = step(2, state, i)
      expected.append(jax.device_get(metrics))

    got = []
    for i, session in enumerate(SESSIONS):
      layout, _ = prepared(session)
      checkpoints = Checkpoints(tmp_path)
      like = sharding.on_mesh(sharding.abstract_state(SETTINGS), layout.state)
      restored = checkpoints.restore(like)
      if i == 0:
        assert restored is None
        new = sharding.initial_state(SETTINGS, layout)
      else:
        new = restored[0]
      new, metrics = step(session, new, i)
      checkpoints.save(i + 1, new, {})
      checkpoints.close()
      got.append(jax.device_get(metrics))
  assert_close(got, expected, 1e-5)
  assert_close(
    jax.tree.leaves(jax.device_get(new)),
    jax.tree.leaves(jax.device_get(state)),
    1e-4,  # Adam divides by roots of small sums
  )


def test_memories_are_watched_over_rows_and_heads():
  settings, watched = replace(SETTINGS, watch_tokens=20), []
  for i in (0, 2):
    layout, _ = prepared(i)
    rows = list(range(SETTINGS.batch_size))
    data = sharding.global_batch(batch(0), rows, len(rows), layout.batch)
    with jax.set_mesh(layout.mesh):
      params = sharding.initial_state(SETTINGS, layout).params
      watch = training.compiled_watch(settings, layout)
      watched.append(jax.device_get(watch(params, data)))
  assert set(watched[0]) == {"state_norm", "gate_entropy"}
  chex.assert_trees_all_close(*watched, rtol=1e-4)


def test_weights_and_moments_are_spread():
  deep = replace(SETTINGS, model=replace(SETTINGS.model, family="titans"))
  layout = sharding.layout(deep, prepared(0)[0].mesh)
  specs = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf.spec
    for path, leaf in jax.tree_util.tree_leaves_with_path(layout.state)
  }
  found = lambda end: [spec for name, spec in specs.items() if end in name]
  # The weight, and two moments.
  q = found("mixer.q.kernel")
  assert q == [jax.P(None, "fsdp", "tensor", None)] * 3
  out = found("mixer.out.kernel")
  assert out == [jax.P(None, "tensor", None, "fsdp")] * 3
  down = found("feed_forward.down.kernel")
  assert down == [jax.P(None, "tensor", "fsdp")] * 3
  assert found("embedding.table") == [jax.P("tensor", "fsdp")] * 3
  assert found("mixer.initial.") == [
    jax.P(None, "tensor", *[None] * (len(spec) - 2))
    for spec in found("mixer.initial.")
  ]
  assert len(found("mixer.initial.")) >= 6


@pytest.mark.parametrize(
  ("letters", "shape", "expected"),
  [
    ("df", (8, 16), ("fsdp", "tensor")),
    ("fd", (2, 16, 8), (None, "tensor", "fsdp")),
    ("dn", (8, 3), ("fsdp", None)),
    ("dd", (8, 8), ("fsdp", None)),
    ("df", (6, 16), (None, "tensor")),
    ("df", (6, 2**16), (None, "tensor")),
    ("n__", (3, 2, 64, 2048), (None, "tensor", None, "fsdp")),
    ("n__", (3, 2, 4, 8), (None, "tensor", None, None)),
    ("", (2**20,), (None,)),
  ],
)
def test_axes_of_an_array(letters, shape, expected):
  mesh = prepared(0)[0].mesh
  assert sharding.partition(letters, shape, mesh) == jax.P(*expected)


def test_segments_that_cannot_be_spread():
  mesh = prepared(1)[0].mesh
  with pytest.raises(InputError, match="length must be .* 40, 2 and 8"):
    sharding.layout(replace(SETTINGS, length=40), mesh)
  plain = replace(SETTINGS, model=replace(SETTINGS.model, caching="none"))
  with pytest.raises(InputError, match="model.caching grm, soup or ssc"):
    sharding.layout(plain, mesh)


def test_rows_that_cannot_be_spread():
  mesh = prepared(0)[0].mesh
  settings = Settings(batch_size=6)
  with pytest.raises(InputError, match="6, must be a multiple of .*, 4"):
    sharding.layout(settings, mesh)
  with pytest.raises(InputError, match="does not fit 8 devices"):
    sharding.make_mesh(MeshSettings(fsdp=-1, tensor=3))
