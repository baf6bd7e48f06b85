"""Calls of the ops that have kernels for GPUs: sizes, arrays, functions.

`gpu_resources` compiles them, `gpu_check` runs them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from memcache_jax import ops
from memcache_jax.caching._aggregators import Selection
from memcache_jax.caching._sparse_read import read_selected
from memcache_jax.memories import Linear, Miras
from memcache_jax.ops import mlp_memory as networks

# States that each token selects.
_SELECTED = 2


@dataclass(frozen=True)
class Case:
  """One call of an op.

  Attributes:
    op: its name, as kernels have it in theirs.
    width: of keys and values.
    dtype: of these.
    length: tokens of a segment, for each of which there is a state to read.
    tokens: of the call.
    carried: memories carried into it; with any, documents start.
    write_mode: of segments; everything decays but in independent mode.
    heads: of one row.
  """

  op: str
  width: int
  dtype: str = "bfloat16"
  length: int = 256
  tokens: int = 4096
  carried: int = 0
  write_mode: Literal["checkpoint", "independent"] = "checkpoint"
  heads: int = 8

  @property
  def differentiated(self) -> bool:
    """Whether gradients are kernels, too."""
    return self.op != "mlp_memory"

  @property
  def states(self) -> int:
    return self.carried - (-self.tokens // self.length)


def call_of(case: Case) -> tuple[Callable[..., Any], dict[str, Any]]:
  """A function of arrays and an implementation, and the arrays' shapes."""
  return _CALLS[case.op](case)


def _array(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


def _tokens(case: Case, names: str):
  shape = (1, case.tokens, case.heads, case.width)
  return {name: _array(*shape, dtype=case.dtype) for name in names}


def _gates(case: Case, *names: str):
  shape = (1, case.tokens, case.heads)
  return {name: _array(*shape) for name in names}


def _weights(case: Case):
  return {"weights": _array(1, case.tokens, case.heads, case.states)}


def _cached_linear_attention(case: Case):
  n, d = case.heads, case.width
  arrays = _tokens(case, "qkv") | _weights(case) | _gates(case, "own_weight")
  if case.write_mode == "checkpoint":
    arrays |= _gates(case, "log_decay", "write")
  if case.carried:
    arrays["memories"] = _array(1, case.carried, n, d, d)
    arrays["state"] = _array(1, n, d, d)
  options = dict(segment_length=case.length, write_mode=case.write_mode)
  return functools.partial(ops.cached_linear_attention, **options), arrays


def _cache_read(case: Case):
  states = _array(1, case.states, case.heads, case.width, case.width)
  return ops.cache_read, {
    **_tokens(case, "q"),
    "states": states,
    **_weights(case),
  }


def _selected(weights):
  """The largest gates, of states that differ; zeros for the others."""
  least = jax.lax.top_k(weights, _SELECTED)[0][..., -1:]
  return jnp.where(weights >= least, weights, 0.0)


def _selection(weights):
  weights, index = jax.lax.top_k(weights, _SELECTED)
  return Selection(index, weights, weights[..., 0])


def _selected_read(case: Case):
  def run(q, states, weights, *, implementation):
    if implementation == "reference":
      weights = _selected(weights)
      return ops.cache_read(q, states, weights, implementation=implementation)
    memory = Linear(implementation=implementation)
    return read_selected(memory, {}, states, q, _selection(weights))

  return run, _cache_read(case)[1]


def _network(case: Case):
  """An MLP of the library; of a width that a norm cannot have without it."""
  return networks.MLP(norm=not case.width & (case.width - 1))


def _read_networks(case: Case):
  network, n, d = _network(case), case.heads, case.width
  params = jax.eval_shape(
    lambda: network.init_params(jax.random.key(0), n, d, d)
  )
  maps = network.affine_maps(d, d)
  arrays = {
    **_tokens(case, "q"),
    **_weights(case),
    "memories": {
      name: _array(1, case.states, *params[name].shape) for name in maps
    },
    "params": {name: x for name, x in params.items() if name not in maps},
  }
  return functools.partial(networks.read_networks, network), arrays


def _read_selected_networks(case: Case):
  network = _network(case)
  read_all, arrays = _read_networks(case)

  def run(params, memories, q, weights, *, implementation):
    if implementation == "reference":
      weights = _selected(weights)
      return read_all(
        params, memories, q, weights, implementation=implementation
      )
    memory = Miras(network, implementation=implementation)
    return read_selected(memory, params, memories, q, _selection(weights))

  return run, arrays


def _mlp_memory(case: Case):
  """Titans' rule, over documents of two inner batches: errors grow in each."""
  n, d, network, batch = case.heads, case.width, _network(case), 16
  arrays = {
    **_tokens(case, "qkv"),
    "params": jax.eval_shape(
      lambda: network.init_params(jax.random.key(0), n, d, d)
    ),
    "step": _array(1, case.tokens, n, 1),
    **_gates(case, "log_decay", "momentum"),
  }

  def run(momentum, **arrays):
    starts = jnp.arange(case.tokens)[None] % (2 * batch) == 0
    if case.carried:
      starts |= _starts(momentum)
    return networks.mlp_memory(
      **arrays,
      momentum=momentum,
      starts=starts,
      max_unaligned_starts=case.carried,
      architecture=network,
      loss=networks.L2(),
      inner_batch=batch,
    )

  return run, arrays


def _delta_rule(case: Case):
  n, d = case.heads, case.width
  arrays = _tokens(case, "qkv") | _gates(case, "beta", "log_decay")
  if not case.carried:
    return ops.delta_rule, arrays
  arrays |= {"state": _array(1, n, d, d), "initial": _array(n, d, d)}

  def run(beta, **arrays):
    return ops.delta_rule(beta=beta, starts=_starts(beta), **arrays)

  return run, arrays


def _starts(gate):
  """Unknown when a program is compiled."""
  return jnp.isnan(gate[..., 0])


_CALLS = {
  "cached_linear_attention": _cached_linear_attention,
  "cache_read": _cache_read,
  "selected_read": _selected_read,
  "delta_rule": _delta_rule,
  "read_networks": _read_networks,
  "read_selected_networks": _read_selected_networks,
  "mlp_memory": _mlp_memory,
}
OPS = tuple(_CALLS)
