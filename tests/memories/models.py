"""The memories under contract, each alone and cached in every way."""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from memcache_jax.caching import (
  Cached,
  Constant,
  Explicit,
  GatedResidual,
  Logarithmic,
  MemorySoup,
  MovingAverage,
  Residual,
  SparseSelective,
)
from memcache_jax.memories import (
  RWKV7,
  TTTMLP,
  Atlas,
  Cell,
  DecayedLinear,
  DeepLinear,
  DeepSlidingWindow,
  Delta,
  GatedDelta,
  HeadShape,
  LaCT,
  Linear,
  Memora,
  Memory,
  Moneta,
  Omega,
  Optimizer,
  SlidingWindowLinear,
  Titans,
  TTTLinear,
  Yaad,
)
from memcache_jax.ops.mlp_memory import MLP, MuonClosing

SHAPE = HeadShape(num_heads=2, key_dim=4, value_dim=3)
SEGMENT = 5
CHUNK = 3  # neither divides the other, nor a length used in the tests


@dataclass(frozen=True)
class Saturating(Memory):
  """A user's memory: only what must be defined, and not linear to read."""

  def init_state(self, params, shape, batch, *, max_length=None):
    del params, max_length
    n, k, v = shape
    return jnp.zeros((batch, n, k, v), jnp.float32)

  def step(self, params, state, k, v, gates):
    del params, gates
    written = jnp.einsum("bnk,bnv->bnkv", k, v).astype(jnp.float32)
    return 0.9 * state + written

  def read(self, params, memory, q):
    del params
    y = jnp.einsum("btnk,bnkv->btnv", q.astype(jnp.float32), memory)
    return jnp.tanh(y)


# A new memory is one line here.
MEMORIES = (
  Linear(chunk_size=CHUNK),
  DecayedLinear.mamba2(),
  DecayedLinear.retnet(),
  SlidingWindowLinear(3, chunk_size=CHUNK),
  Saturating(),
)

# One of each kind: these meet every aggregator, in the write modes by turns.
# (Without decay, or with a constant one, the same op computes a part of what
# it can.)
GRID = (MEMORIES[1], MEMORIES[3], MEMORIES[4])

AGGREGATORS = (
  Residual(),
  GatedResidual(),
  GatedResidual(gate="shared", pooling="sum"),
  GatedResidual(gate="input", max_segments=12),
  MemorySoup(),
  MovingAverage(),
  SparseSelective(2),
  SparseSelective(1, gate="none"),
)

WRITE_MODES = ("independent", "checkpoint")

# Blocks of segments: every way of merging them.
LOGARITHMIC = (
  Cached(DecayedLinear(), Logarithmic(3), GatedResidual()),
  Cached(
    SlidingWindowLinear(3), Logarithmic(3), SparseSelective(1), "checkpoint"
  ),
  Cached(Saturating(), Logarithmic(2), MemorySoup()),
)

# Segments that end where the tokens say.
EXPLICIT = (
  Cached(DecayedLinear.mamba2(), Explicit(SEGMENT, 24), SparseSelective(2)),
)

# Compiles fast, and no layer norm over three numbers blows up rounding.
# Networks are tested in tests/ops/mlp_memory_test.py.
FLAT = MLP.matrix()

# Memories of the other families, bare and cached; the first are in SELECTION.
OTHERS = (
  GatedDelta(chunk_size=CHUNK),
  Titans(inner_batch=4, architecture=MLP(depth=2, norm=False, residual=False)),
  Omega(FLAT, inner_batch=2, window=4),
  Moneta(FLAT, inner_batch=4),
  Cell(nnx.OptimizedLSTMCell),
  RWKV7("learned", chunk_size=CHUNK),
  Delta("learned", max_beta=2.0, chunk_size=CHUNK),
  DeepLinear(FLAT, inner_batch=4),
  DeepSlidingWindow(FLAT, inner_batch=4),
  TTTLinear(MLP(depth=1, bias=True, residual=False, norm=False), inner_batch=4),
  TTTMLP(FLAT, inner_batch=4),
  Yaad(FLAT, inner_batch=4),
  Memora(FLAT, inner_batch=4, init_std=1.0),
  # More iterations blow up the rounding of small singular values.
  Atlas(
    FLAT, optimizer=Optimizer(True, MuonClosing(iterations=1)), inner_batch=4
  ),
  LaCT(inner_batch=4),
  Titans(FLAT, inner_batch=4, delayed=True),
)
OTHERS_CACHED = (
  Cached(OTHERS[0], Constant(SEGMENT), SparseSelective(2), "checkpoint"),
  Cached(OTHERS[1], Constant(8), GatedResidual()),
  Cached(OTHERS[4], Constant(SEGMENT), MemorySoup(), "checkpoint"),
  Cached(OTHERS[3], Constant(SEGMENT), SparseSelective(2)),
)

CACHED = (
  LOGARITHMIC
  + EXPLICIT
  + OTHERS_CACHED
  + tuple(
    Cached(memory, Constant(SEGMENT), aggregate, WRITE_MODES[(i + j) % 2])
    for (i, memory), (j, aggregate) in itertools.product(
      enumerate(GRID), enumerate(AGGREGATORS)
    )
  )
)

# Every memory, every aggregator and either write mode several times over: for
# properties that are slow to compile. (Delta is GatedDelta without the decay.)
SELECTION = (
  *MEMORIES,
  *OTHERS[:6],
  *LOGARITHMIC,
  *EXPLICIT,
  *OTHERS_CACHED[:2],
) + tuple(
  Cached(memory, Constant(SEGMENT), aggregate, WRITE_MODES[(i + j) % 2])
  for (i, memory), (j, aggregate) in itertools.product(
    enumerate(MEMORIES), enumerate(AGGREGATORS)
  )
  if (i + 2 * j) % len(MEMORIES) == 0
)


def name(memory: Memory) -> str:
  """A short name for test ids."""
  if not isinstance(memory, Cached):
    return _short(memory)
  parts = (
    _short(memory.memory),
    _short(memory.aggregate),
    memory.write_mode,
    type(memory.segments).__name__,
  )
  return "-".join(parts)


def _short(x) -> str:
  fields = (
    getattr(x, field, None) for field in ("decay", "gate", "top_k", "window")
  )
  return type(x).__name__ + "".join(f"_{f}" for f in fields if f is not None)
