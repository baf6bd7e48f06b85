"""Which device holds what: a mesh, and a layout by the letters of axes.

Rows of a batch lie over the axes data and fsdp. Weights and the moments of the
optimiser are spread over fsdp along the model width, and over tensor along
heads, hidden units and vocabulary; sequence spreads the segments of a row. The
axes of the mesh are Explicit: how every array lies is part of its type, so that
what would have to be moved unasked is an error, and kernels run on the rows and
heads that a device holds. The compiler inserts the communication.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.experimental import mesh_utils

from examples import functional
from examples.lm import training
from examples.lm.model import model_config
from examples.lm.packing import Batch
from examples.lm.settings import MeshSettings, Settings
from examples.train_state import TrainState
from examples.workdir import InputError
from memcache_jax.layers import InitialMemory, Projection
from memcache_jax.models import Embedding, ModelConfig

AXES = ("data", "fsdp", "tensor", "sequence")

# Those over which the rows of a batch lie.
ROWS = ("data", "fsdp")

# Mesh axes by the library's letters for axes of weights; l is the vocabulary.
MESH_AXIS = {"d": "fsdp", "n": "tensor", "f": "tensor", "l": "tensor"}

# Arrays with fewer elements are not worth spreading over fsdp.
SMALL = 2**16


@dataclass(frozen=True, eq=False)
class Layout:
  """Shardings of everything a step takes and returns."""

  mesh: jax.sharding.Mesh
  state: TrainState
  batch: jax.NamedSharding
  everywhere: jax.NamedSharding


def make_mesh(
  settings: MeshSettings, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Arranges devices, all by default, along the axes of the mesh.

  Raises:
    InputError: when they cannot be.
  """
  devices = jax.devices() if devices is None else devices
  shape = [getattr(settings, axis) for axis in AXES]
  known = math.prod(size for size in shape if size != -1)
  if shape.count(-1) == 1 and known > 0 and len(devices) % known == 0:
    shape[shape.index(-1)] = len(devices) // known
  if any(size < 1 for size in shape) or math.prod(shape) != len(devices):
    raise InputError(
      f"mesh {dict(zip(AXES, shape, strict=True))} does not fit "
      f"{len(devices)} devices"
    )
  # Devices of a topology that is not here have no such number.
  slices = {
    getattr(device, "slice_index", 0)
    for device in devices
    if device.platform == "tpu"
  }
  if len(slices) > 1:
    raise InputError(f"a mesh has the chips of one slice: got {len(slices)}")
  # Not jax.make_mesh, which on v5p refuses sizes that are no product of whole
  # axes of the torus: 2 on 8 x 8 x 4 chips.
  arranged = mesh_utils.create_device_mesh(
    shape, devices, allow_split_physical_axes=True
  )
  types = (jax.sharding.AxisType.Explicit,) * len(AXES)
  return jax.sharding.Mesh(arranged, AXES, axis_types=types)


@functools.cache
def layout(settings: Settings, mesh: jax.sharding.Mesh) -> Layout:
  """Where everything lies; one object for equal arguments.

  Raises:
    InputError: when the rows of a batch cannot be spread evenly.
  """
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  rows = settings.batch_size // settings.optimizer.accumulate
  if rows % devices:
    raise InputError(
      f"batch_size / accumulate, {rows}, must be a multiple of the devices "
      f"along data and fsdp, {devices}"
    )
  _check_sequence(settings, mesh.shape["sequence"])
  letters = axis_letters(model_config(settings.model))

  def place(path, leaf):
    spec = partition(_letters_of(path, letters), leaf.shape, mesh)
    return jax.NamedSharding(mesh, spec)

  abstract = abstract_state(settings)
  return Layout(
    mesh=mesh,
    state=jax.tree_util.tree_map_with_path(place, abstract),
    batch=jax.NamedSharding(
      mesh, jax.P(_used(mesh, ROWS), _used(mesh, ("sequence",)) or None)
    ),
    everywhere=jax.NamedSharding(mesh, jax.P()),
  )


def _check_sequence(settings: Settings, devices: int) -> None:
  """Raises InputError unless segments can be spread over devices."""
  if devices == 1:
    return
  model = settings.model
  if (
    model.family not in ("swla", "dla", "titans", "memora")
    or model.caching not in ("grm", "soup", "ssc")
    or model.write_mode != "independent"
    or settings.data.packing != "aligned"
  ):
    raise InputError(
      "mesh.sequence above 1 takes model.family swla, dla, titans or memora, "
      "model.caching grm, soup or ssc, model.write_mode independent and "
      f"data.packing aligned: got {model.family}, {model.caching}, "
      f"{model.write_mode} and {settings.data.packing}"
    )
  if settings.watch_tokens:
    raise InputError(
      "watch_tokens must be 0 with mesh.sequence above 1: got "
      f"{settings.watch_tokens}"
    )
  if settings.length % (devices * model.segment_length):
    raise InputError(
      "length must be a multiple of mesh.sequence times model.segment_length: "
      f"got {settings.length}, {devices} and {model.segment_length}"
    )


def _used(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
  """Those that have more than one device."""
  return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def abstract_state(settings: Settings) -> TrainState:
  """Shapes of the state."""
  return jax.eval_shape(lambda: training.initial_state(settings))


def abstract_batch(settings: Settings) -> Batch:
  """Shapes of a batch."""
  return jax.eval_shape(
    lambda: Batch.empty(settings.batch_size, settings.length)
  )


def initial_state(settings: Settings, shardings: Layout) -> TrainState:
  """The state before the first step, made where it belongs."""
  return _initial(settings, shardings)()


@functools.cache
def _initial(settings: Settings, shardings: Layout) -> Callable[[], TrainState]:
  """Compiled once for all sessions of one process."""
  return jax.jit(
    lambda: training.initial_state(settings), out_shardings=shardings.state
  )


def axis_letters(config: ModelConfig) -> dict[tuple[str, ...], str]:
  """Letters of the axes of every large parameter, by its path.

  Axes in front that are not named stack the layers.
  """
  model = functional.abstract(config)
  letters = {}
  for path, module in nnx.iter_modules(model):
    if isinstance(module, Projection):
      letters[_names((*path, "kernel"))] = module.axes
    elif isinstance(module, Embedding):
      letters[_names((*path, "table"))] = "ld"
  for path, variable in nnx.to_flat_state(nnx.state(model, InitialMemory)):
    # Heads come first behind the axis of layers; the rest has no letters.
    letters[_names(path)] = "n" + "_" * (variable.ndim - 2)
  return letters


def _names(path: tuple) -> tuple[str, ...]:
  return tuple(str(name) for name in path)


def _letters_of(path: tuple, letters: dict[tuple[str, ...], str]) -> str:
  """Letters of a leaf of the state: a parameter, or a moment of one.

  The path of a moment ends in that of its parameter.
  """
  names = []
  for entry in path:
    name = getattr(entry, "name", getattr(entry, "key", None))
    names.append(str(entry.idx if name is None else name))
  if names and names[-1] == "value":
    names.pop()
  for start in range(len(names)):
    found = letters.get(tuple(names[start:]))
    if found is not None:
      return found
  return ""


def partition(
  letters: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh
) -> jax.P:
  """Mesh axes of an array whose last axes have these letters.

  An axis that does not divide evenly is left whole. A large array of which
  nothing lies over fsdp is spread along its longest axis that divides.
  """
  stacked, used = len(shape) - len(letters), _used(mesh, AXES)
  spec: list[Any] = [None] * len(shape)
  for i, letter in enumerate(letters, start=stacked):
    axis = MESH_AXIS.get(letter)
    if axis in used and axis not in spec and shape[i] % mesh.shape[axis] == 0:
      spec[i] = axis
  missing = letters and "fsdp" in used and "fsdp" not in spec
  if missing and math.prod(shape) >= SMALL:
    free = [
      i
      for i in range(stacked, len(shape))
      if spec[i] is None and shape[i] % mesh.shape["fsdp"] == 0
    ]
    if free:
      spec[max(free, key=lambda i: shape[i])] = "fsdp"
  return jax.P(*spec)


def on_mesh(tree: Any, shardings: Any) -> Any:
  """Shapes with their shardings, for restoring and for compiling ahead."""
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    tree,
    shardings,
  )


def local_rows(sharding: jax.NamedSharding, batch_size: int) -> list[int]:
  """Rows of a batch that devices of this process hold, in order."""
  whole = jax.NamedSharding(sharding.mesh, jax.P(*sharding.spec[:1]))
  indices = whole.addressable_devices_indices_map((batch_size, 1))
  rows = {
    row
    for index in indices.values()
    if index is not None
    for row in range(*index[0].indices(batch_size))
  }
  return sorted(rows)


def global_batch(
  batch: Batch, rows: list[int], batch_size: int, sharding: jax.NamedSharding
) -> Batch:
  """Puts this process's rows on its devices, as its part of one array."""
  place = {row: i for i, row in enumerate(rows)}

  def put(x):
    def part(index):
      first, stop, _ = index[0].indices(batch_size)
      return x[place[first] : place[first] + stop - first, *index[1:]]

    shape = (batch_size, *x.shape[1:])
    return jax.make_array_from_callback(shape, sharding, part)

  return jax.tree.map(put, batch)
