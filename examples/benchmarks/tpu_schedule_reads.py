"""What reads of stored memories cost on a TPU; part of `tpu_schedule`.

Loops over states count by what takes longer, their bundles or their products:
the units make a kernel wait that asks for more. Of reads of selected states
every tile in use counts as a full one.
"""

import functools
import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from examples.benchmarks.tpu_schedule import (
  BYTES_PER_CYCLE,
  CYCLES_PER_SECOND,
  FLOPS_PER_CYCLE,
  TOPOLOGY,
  bundles,
  count_bundles,
  xla_cycles,
)

PACKAGE = "memcache_jax.pallas_kernels"


@dataclass(frozen=True)
class Read:
  """One call of 4096 tokens of 8 heads and 64 states, bfloat16.

  Attributes:
    width: of keys and values.
    selected: states that each token reads, at random; None for all.
    backward: gradients instead of reads.
    hidden: width of the hidden layer of stored networks; None for matrices.
  """

  width: int
  selected: int | None = None
  backward: bool = False
  hidden: int | None = None
  tokens: int = 4096
  states: int = 64
  heads: int = 8

  @property
  def name(self) -> str:
    what = "all" if self.selected is None else f"{self.selected} selected"
    what += " matrices" if self.hidden is None else " networks"
    return f"{'backward' if self.backward else 'forward'}, {what}"

  @property
  def kernels(self) -> list[str]:
    what = "cache_read" if self.hidden is None else "mlp_memory"
    if self.selected is not None:
      return [f"memcache_{what}_selected_{'bwd' if self.backward else 'fwd'}"]
    if self.hidden is not None:
      return [f"memcache_mlp_memory_read{'_bwd' if self.backward else ''}"]
    ways = ["bwd_tokens", "bwd_states"] if self.backward else ["fwd"]
    return [f"memcache_cache_read_{way}" for way in ways]

  @property
  def flops(self) -> float:
    """Of all products; gradients of networks read them again."""
    per_token = self.states if self.selected is None else self.selected
    size, products = self.width**2, 2 if self.backward else 1
    if self.hidden is not None:
      size = 2 * self.width * self.hidden
      products = 3 if self.backward else 1
    return products * self.heads * self.tokens * per_token * 2 * size


CASES = [
  Read(128),
  Read(256),
  Read(128, backward=True),
  Read(256, backward=True),
  Read(128, selected=2),
  Read(256, selected=2),
  Read(128, selected=2, backward=True),
  Read(256, selected=2, backward=True),
  Read(128, hidden=512),
  Read(128, hidden=512, backward=True),
  Read(128, selected=2, hidden=512),
  Read(128, selected=2, hidden=512, backward=True),
]


def module_of(name):
  return importlib.import_module(f"{PACKAGE}.{name}")


@functools.cache
def _place():
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=TOPOLOGY
  )
  return SingleDeviceSharding(topology.devices[0])


def array(*shape, dtype="float32"):
  import jax

  return jax.ShapeDtypeStruct(shape, dtype, sharding=_place())


def prepare(case: Read):
  """The kernels, their arguments, and cycles of one, of what was dumped."""
  if case.selected is not None:
    return _of_selected(case)
  return _of_all(case) if case.hidden is None else _of_networks(case)


def _of_all(case: Read):
  t, n, w, s = case.tokens, case.heads, case.width, case.states
  pieces = module_of("cache_read.config")
  config = pieces.config(pieces.Call(w, w, "bfloat16", t, s))
  q = array(1, n, t, w, dtype="bfloat16")
  arrays = q, array(1, s, n, w, w), array(1, n, s, t)
  forward = module_of("cache_read.mosaic_tpu")

  def run(*arrays):
    if case.backward:
      module = module_of("cache_read.mosaic_tpu_vjp")
      return module.bwd(*arrays, config=config)
    return forward.fwd(*arrays, config=config)

  def cycles(dump, kernel):
    depths, _ = count_bundles(dump, kernel)
    blocks = n * (t // config.rows)
    group = 2 * config.rows * forward.UNROLL * w * w / FLOPS_PER_CYCLE
    loop = max(depths[2], group) * blocks * (s // forward.UNROLL)
    return depths[0] + depths[1] * blocks * -(-s // config.states) + loop

  return run, (*arrays, q) if case.backward else arrays, cycles


def _of_selected(case: Read):
  import jax
  import jax.numpy as jnp

  t, n, w, s = case.tokens, case.heads, case.width, case.states
  pieces = module_of("cache_read.config")
  network, sizes, weights, static = _network(case)
  call = pieces.SelectedCall(
    *(w, w, "bfloat16"), t, s, selected=case.selected, heads=n, maps=sizes
  )
  config = pieces.selected_config(call)
  forward = module_of("cache_read.selected")
  count = pieces.tiles(call, config)
  integers = lambda *shape: array(1, n, *shape, dtype="int32")
  tiles = forward.Tiles(
    state=integers(count + config.ring),
    used=integers(),
    rows=integers(count),
    place=integers(*pieces.table_shape(config)),
    weights=array(1, n, config.tile, pieces.lanes(count)),
  )
  dtype = jnp.dtype("bfloat16")
  if network is None:
    reader, states = forward.matrices(w, w, dtype), array(1, s, n, w, w)
  else:
    networks = module_of("mlp_memory.selected").networks
    reader, states = networks(network.forward, w, w, dtype), weights
  q = array(1, n, t, w, dtype=dtype)
  words = jax.eval_shape(
    module_of("cache_read.selected_rows").encode,
    *((q, q) if case.backward else (q,)),
  )
  words = [array(*x.shape, dtype=x.dtype) for x in words]

  def run(*arrays):
    if case.backward:
      module = module_of("cache_read.selected_vjp")
      return module.bwd(reader, *arrays, config=config)
    return forward.fwd(reader, *arrays, config=config)

  def cycles(dump, kernel):
    depths, _ = count_bundles(dump, kernel)
    columns = t // config.tokens_per_column
    steps = -(-tiles_in_use(case, config.tile) // config.tiles_per_step)
    # States that are fetched beforehand, rows to their places, tiles, the last
    # gradients of states on their way, and rows back. No loop runs only once.
    ahead = config.ring // config.tiles_per_step - 1
    trips = [ahead] * (ahead > 1) + [columns, steps]
    trips += [2 * config.tiles_per_step] * case.backward + [columns]
    loops = loop_lengths(dump, kernel)
    of_head = sum(x * y for x, y in zip(loops, trips, strict=True))
    return depths[0] + n * (depths[1] + of_head)

  return run, (words, states, static, tiles), cycles


def loop_lengths(dump: Path, kernel: str) -> list[int]:
  """Bundles of each of the loops within the grid."""
  lengths = []
  for depth, _, begins in bundles(dump, kernel):
    if depth == 2:
      lengths += [0] * begins
      lengths[-1] += 1
  return lengths


def tiles_in_use(case: Read, tile: int) -> int:
  """Of one head, where tokens select at random."""
  rng = np.random.default_rng(0)
  chosen = rng.random((case.tokens, case.states)).argsort(1)
  chosen = chosen[:, : case.selected].reshape(-1)
  count = np.bincount(chosen, minlength=case.states)
  return int(np.sum(-(-count // tile)))


def _network(case: Read):
  """The network, sizes of its maps, its arrays, and those that are shared."""
  from memcache_jax.ops.mlp_memory import MLP

  if case.hidden is None:
    return None, (), {}, {}
  n, w, s = case.heads, case.width, case.states
  network = MLP(hidden_factor=case.hidden // w)
  maps = network.affine_maps(w, w).items()
  sizes = tuple((x.in_dim, x.out_dim) for _, x in maps)
  weights = {name: array(1, s, n, x.in_dim, x.out_dim) for name, x in maps}
  static = {name: array(1, n, 1, w) for name in ("ln_gain", "ln_bias")}
  return network, sizes, weights, static


def _of_networks(case: Read):
  t, n, w, s = case.tokens, case.heads, case.width, case.states
  network, sizes, weights, static = _network(case)
  pieces = module_of("mlp_memory.config")
  call = pieces.Call(sizes, w, w, "bfloat16", t, s)
  q = array(1, n, t, w, dtype="bfloat16")
  if case.backward:
    config = pieces.gradient_config(call)
    rows, run = config.tokens, module_of("mlp_memory.mosaic_tpu_vjp").bwd
    arrays = (q, weights, static, array(1, n, s, 1, t), q)
  else:
    config = pieces.config(call)
    forward = module_of("mlp_memory.mosaic_tpu").fwd
    rows, run = config.rows, functools.partial(forward, width=w)
    arrays = (q, weights, static, array(1, n, s, 1, t))

  def cycles(dump, kernel):
    depths, _ = count_bundles(dump, kernel)
    steps = n * (t // rows) * s
    loop = depths[2] * steps * (rows // config.chunk)
    return depths[0] + depths[1] * steps + loop

  run = functools.partial(run, network.forward, config=config)
  return run, arrays, cycles


def _xla(case: Read):
  """The XLA form of a call that reads all, and its arguments."""
  import jax

  from memcache_jax.ops import cache_read
  from memcache_jax.ops.mlp_memory import read_networks

  t, n, w, s = case.tokens, case.heads, case.width, case.states
  q, states = array(1, t, n, w, dtype="bfloat16"), array(1, s, n, w, w)
  gates = array(1, t, n, s)
  if case.hidden is None:
    run = functools.partial(cache_read, implementation="xla")
    arrays = (q, states, gates)
  else:
    network, _, memories, static = _network(case)
    static = {name: array(n, w) for name in static}
    run = functools.partial(read_networks, network, implementation="xla")
    arrays = (static, memories, q, gates)
  if not case.backward:
    return run, arrays
  # Of the forward pass only what gradients need is left.
  pull = lambda d_y, *arrays: jax.vjp(run, *arrays)[1](d_y)
  return pull, (array(1, t, n, w), *arrays)


@functools.cache
def measure(case: Read, dump: Path) -> dict:
  """One row of the table."""
  import jax

  run, arrays, cycles_of = prepare(case)
  memory = jax.jit(run).lower(*arrays).compile().memory_analysis()
  cycles = sum(cycles_of(dump, kernel) for kernel in case.kernels)
  traffic = memory.argument_size_in_bytes + memory.output_size_in_bytes
  row = {
    "width": case.width,
    "call": case.name,
    "cycles": round(cycles),
    "of the bound": f"{case.flops / FLOPS_PER_CYCLE / cycles:.0%}",
    "ms": f"{cycles / CYCLES_PER_SECOND * 1e3:.2f}",
    "memory cycles": round(traffic / BYTES_PER_CYCLE),
    "temporaries": memory.temp_size_in_bytes,
    "XLA cycles": "",
    "XLA / kernel": "",
    "all / selected": "",
  }
  if case.selected is None:
    form, arrays = _xla(case)
    text = jax.jit(form).lower(*arrays).compile().as_text()
    estimate = xla_cycles(text)
    row["XLA cycles"] = round(estimate)
    row["XLA / kernel"] = f"{estimate / cycles:.1f}x"
  if case.selected is not None:
    all_of = replace(case, selected=None)
    row["all / selected"] = f"{measure(all_of, dump)['cycles'] / cycles:.1f}x"
  return row
