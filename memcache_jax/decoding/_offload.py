"""Cached memories in the memory of the host, which is larger."""

import jax

from memcache_jax.array_typing import State
from memcache_jax.caching import Cached, CacheState, SparseSelective, _host
from memcache_jax.decoding._states import check_state
from memcache_jax.models import LanguageModel

_KIND = "pinned_host"


def to_host(
  model: LanguageModel, state: tuple[State, ...]
) -> tuple[State, ...]:
  """Moves cached memories to the host; steps bring over those they select.

  A decode step then gives what it gave before, to the bit, and needs room on
  the device for the memories that it reads only. What is written stays on the
  host. Several tokens are read, and new documents begun, on the device: read a
  prompt first, or call `to_device`. Compiled for a TPU (v5e), where the cache
  then takes no room on the device, but run on a CPU only, where both memories
  are one; not compiled for GPUs.

  Args:
    model: the model; its cached layers choose (`SparseSelective`) among
      memories that are all kept. A cache of fewer than a dozen memories for
      each that is chosen is brought over whole.
    state: of it; all but the cached memories are shared with what is returned.

  Raises:
    ValueError: for a layer that reads all memories, or whose cache forgets or
      merges blocks; and where the backend has no such memory.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.caching import Cached, Constant, SparseSelective
    >>> from memcache_jax.decoding import decode_step, prefill, to_host
    >>> from memcache_jax.memories import Linear
    >>> from memcache_jax.models import LanguageModel, MemorySpec, ModelConfig
    >>> memory = Cached(Linear(), Constant(2), SparseSelective(top_k=1))
    >>> config = ModelConfig.tiny(MemorySpec(memory, 2))
    >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
    >>> state = model.init_state(batch=1, max_length=64)
    >>> _, state = jax.jit(prefill)(model, jnp.arange(10)[None], state)
    >>> state = to_host(model, state)
    >>> state[0].memory.memories.sharding.memory_kind
    'pinned_host'
    >>> step = jax.jit(decode_step, donate_argnames="state")
    >>> logits, state = step(model, jnp.array([3]), state)
  """
  check_state(model, state)
  for spec in model.config.pattern:
    memory = getattr(spec, "memory", None)
    if isinstance(memory, Cached) and not _selects(memory):
      raise ValueError(
        "`model` must have caches that keep every segment, and read a few: got "
        f"{memory.aggregate} with {memory.segments}, policy {memory.policy}."
      )

  def move(x):
    kinds = {
      memory.kind
      for device in x.sharding.device_set
      for memory in device.addressable_memories()
    }
    if _KIND not in kinds:
      raise ValueError(
        f"`state` must be on a backend with memory of the kind {_KIND!r}: got "
        f"one with {sorted(kinds)}."
      )
    return jax.device_put(x, x.sharding.with_memory_kind(_KIND))

  def one(x):
    if not isinstance(x, CacheState):
      return x
    return x._replace(memories=jax.tree.map(move, x.memories))

  is_cache = lambda x: isinstance(x, CacheState)
  return jax.tree.map(one, state, is_leaf=is_cache)


def to_device(state: tuple[State, ...]) -> tuple[State, ...]:
  """Brings the cached memories of a state back to the device."""
  return _host.to_device(state)


def _selects(memory: Cached) -> bool:
  return (
    isinstance(memory.aggregate, SparseSelective)
    and memory.policy is None
    and memory.segments.levels(2) == 0
  )
