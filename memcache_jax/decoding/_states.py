"""What can be done with the state of a model besides going on from it.

A state is a pytree of immutable arrays with the batch axis first, so most
tools are one line. To snapshot or to branch, keep it: both branches share all
arrays until a step makes new ones (never keep a state that was donated to
`jax.jit`). Rows: ``jax.tree.map(lambda x: x[rows], state)`` takes some, and
``jax.tree.map(lambda *x: jnp.concatenate(x), a, b)`` joins those of states
with equal room. Any checkpointer of pytrees saves one; what to restore into is
``jax.eval_shape(lambda: model.init_state(batch, max_length))``.
"""

import jax
import jax.numpy as jnp
from jax.core import Tracer

from memcache_jax.array_typing import Array, Int, PyTree, State
from memcache_jax.caching import Cached, CacheState, Constant
from memcache_jax.caching._host import check_on_device
from memcache_jax.layers import AttentionState
from memcache_jax.models import LanguageModel
from memcache_jax.ops import _checks


def mark(model: LanguageModel, state: tuple[State, ...]) -> tuple[State, ...]:
  """What is needed to come back to a state, without its cached memories.

  A mark holds the open segments only, and the cached memories are those of the
  later state that is rewound: a mark at every segment border costs as much as
  the cache itself. (Full attention keeps its keys and values in every mark.)
  With marks at borders, any token is reached by replaying one segment at most.

  Args:
    model: the model.
    state: of it; with constant segments that keep everything.

  Returns:
    For `rewind`. It shares its arrays with the state.

  Raises:
    ValueError: for a memory whose cache forgets, or merges blocks: keep the
      whole state there.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.decoding import mark, prefill, rewind
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> read, text = jax.jit(prefill), jnp.arange(96)[None]
    >>> state = model.init_state(batch=1, max_length=200)
    >>> _, state = read(model, text[:, :48], state)
    >>> border = mark(model, state)
    >>> _, state = read(model, text[:, 48:], state)
    >>> state = rewind(state, border)  # to token 48
    >>> _, state = read(model, text[:, :48], state)  # and on another way
  """
  check_state(model, state)
  _check_prefixes(model)

  def one(x):
    if not isinstance(x, CacheState):
      return x
    return x._replace(memories=None, keys=None)

  return _map(one, state)


def rewind(
  state: tuple[State, ...], to: tuple[State, ...]
) -> tuple[State, ...]:
  """The state at a mark, from a later one of the same documents.

  Rows whose document has ended since have lost what the mark needs: keep the
  whole state if that may happen.

  Args:
    state: reached from the marked one by reading tokens.
    to: what `mark` returned.

  Raises:
    ValueError: when the two are not of the same model and room; where values
      are known, when `state` is not a later one; for a state on the host.
  """
  kinds = lambda tree: [type(x) for x in tree]
  if (
    not isinstance(state, tuple)
    or not isinstance(to, tuple)
    or kinds(state) != kinds(to)
  ):
    raise ValueError(
      "`to` must be a mark of the same model as `state`: got states of "
      f"{type(to).__name__} and {type(state).__name__}."
    )

  check_on_device(state, "be rewound")

  def one(now, then):
    if not isinstance(now, CacheState):
      return then
    _check_mark(now, then)
    kept = then.index >= 0

    def keep(x):
      flags = kept.reshape(kept.shape + (1,) * (x.ndim - 2))
      return jnp.where(flags, x, jnp.zeros((), x.dtype))

    memories, keys = jax.tree.map(keep, (now.memories, now.keys))
    return then._replace(memories=memories, keys=keys)

  return _map(one, state, to)


def with_room(
  model: LanguageModel, state: tuple[State, ...], max_length: int
) -> tuple[State, ...]:
  """A state with room for longer documents; nothing else changes.

  Rows that have read more than they had room for have lost some of it, and
  stay nan.

  So a prefix is read once, kept in a state of just its size, and reused by
  many requests, each with the room that it needs. For several rows repeat the
  result: ``jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), state)``.

  Args:
    model: the model.
    state: of it.
    max_length: tokens of one document to make room for.

  Raises:
    ValueError: when the state has more room already, or is on the host, or for
      logarithmic segments that would need a writer of longer blocks: it would
      have had to read what has passed.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.decoding import prefill, with_room
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> prefix = model.init_state(batch=1, max_length=100)
    >>> _, prefix = jax.jit(prefill)(model, jnp.arange(100)[None], prefix)
    >>> state = with_room(model, prefix, 300)
    >>> logits, state = jax.jit(prefill)(model, jnp.array([[1, 2, 3]]), state)
  """
  _checks.check_positive(max_length=max_length)
  check_state(model, state)
  check_on_device(state, "get more room")
  batch = jax.tree.leaves(state)[0].shape[0]
  empty = model.init_state(batch, max_length)
  for new, old in zip(_caches(empty), _caches(state), strict=True):
    if new.levels is not None or old.levels is not None:
      shape = jax.tree.map(jnp.shape, (new.levels, old.levels))
      if shape[0] != shape[1]:
        raise ValueError(
          "`max_length` must need no more block sizes than the state has: got "
          f"{max_length}, with logarithmic segments."
        )

  def put(path, new, old):
    if new.ndim != old.ndim or any(
      a < b for a, b in zip(new.shape, old.shape, strict=True)
    ):
      raise ValueError(
        "`max_length` must be at least the room of `state`: got "
        f"{max_length}, which makes {jax.tree_util.keystr(path)} of shape "
        f"{new.shape} from {old.shape}."
      )
    return new.at[tuple(slice(size) for size in old.shape)].set(old)

  grown = jax.tree_util.tree_map_with_path(put, empty, state)
  return tuple(map(_spoil_overrun, state, grown))


def verify(
  model: LanguageModel, draft: Int[Array, "b t"], state: tuple[State, ...]
) -> tuple[Int[Array, " b"], Int[Array, " b"], tuple[State, ...]]:
  """Checks drafted tokens in one call: greedy speculative decoding.

  The first token of a draft is one that the model has chosen itself but not
  read yet; those that follow were guessed by something cheaper. A guess is
  accepted if the model, having read all before it, finds it the likeliest.

  Args:
    model: the model.
    draft: ids; at least one per row.
    state: before the draft. Do not donate it: rows return to it.

  Returns:
    How many tokens of each row have been read, from 1 to t; the model's own
    choice after them, with which the next draft begins (-1 where logits are
    nan); and the state after the tokens that have been read.

  Example:
    >>> import jax
    >>> from flax import nnx
    >>> from memcache_jax.decoding import verify
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> state = model.init_state(batch=1, max_length=32)
    >>> check, draft = jax.jit(verify), jax.numpy.array([[1, 2, 3]])
    >>> read, chosen, state = check(model, draft, state)
    >>> bool(1 <= read[0] <= 3)
    True
  """
  _checks.check_shapes({"draft": (draft, "b t")})
  check_state(model, state)
  if draft.shape[1] == 0:
    raise ValueError("`draft` must have at least one token: got none.")
  logits, _ = model(draft, state)
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  wrong = jnp.any(jnp.isnan(logits), axis=-1)
  best = jnp.where(wrong, -1, best)
  right = (best[:, :-1] == draft[:, 1:]).astype(jnp.int32)
  read = 1 + jnp.sum(jnp.cumprod(right, axis=1), axis=1, dtype=jnp.int32)
  chosen = jnp.take_along_axis(best, read[:, None] - 1, axis=1)[:, 0]
  mask = jnp.arange(draft.shape[1])[None] < read[:, None]
  return read, chosen, model.features(draft, state, mask=mask)[1]


def _check_mark(now, then) -> None:
  if now.memories is None or then.memories is not None:
    raise ValueError(
      "`state` must be a whole state, and `to` what `mark` returned: got "
      f"{'a mark' if now.memories is None else 'a whole state'} for both or "
      "in the wrong order."
    )
  if now.index.shape != then.index.shape:
    raise ValueError(
      "`to` must be a mark of as many rows, and made with as much room, as "
      f"`state`: got {then.index.shape}, and {now.index.shape} in `state`."
    )
  if isinstance(now.index, Tracer) or isinstance(then.index, Tracer):
    return
  if bool(jnp.any((then.index >= 0) & (now.index != then.index))):
    raise ValueError(
      "`state` must be later than `to`: got one that lacks segments of it."
    )


def check_state(model: LanguageModel, state: tuple[State, ...]) -> None:
  """Raises ValueError unless the state is a whole one of such a model."""
  if not isinstance(model, LanguageModel):
    raise ValueError(f"`model` must be a LanguageModel: got {model!r}.")
  layers = model.config.num_layers
  whole = isinstance(state, tuple) and len(state) == layers
  if not whole or any(x.memories is None for x in _caches(state)):
    raise ValueError(
      f"`state` must be a whole state of the model's {layers} layers: got "
      f"{type(state).__name__}."
    )


def _spoil_overrun(old: State, new: State) -> State:
  """Makes rows nan that lost what the larger state has room for."""
  lost = []
  if isinstance(old, AttentionState):
    room = old.keys.shape[1]
    if new.keys.shape[1] > room:
      lost.append(old.length > room)
  for before, after in zip(_caches(old), _caches(new), strict=True):
    room = before.index.shape[1]
    if after.index.shape[1] > room:
      most = room if before.levels is None else (1 << room) - 1
      lost.append(before.count > most)

  def spoil(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    rows = lost[0].reshape((-1,) + (1,) * (x.ndim - 1))
    return jnp.where(rows, jnp.full((), jnp.nan, x.dtype), x)

  return jax.tree.map(spoil, new) if lost else new


def _map(function, *states) -> PyTree:
  """Maps over layers' states, with the cache of one as a leaf."""
  is_cache = lambda x: isinstance(x, CacheState)
  return jax.tree.map(function, *states, is_leaf=is_cache)


def _caches(state) -> list[CacheState]:
  is_cache = lambda x: isinstance(x, CacheState)
  leaves = jax.tree.leaves(state, is_leaf=is_cache)
  return [x for x in leaves if is_cache(x)]


def _check_prefixes(model):
  """A cache must hold at any time what it held before, and more behind."""
  for spec in model.config.pattern:
    memory = getattr(spec, "memory", None)
    if isinstance(memory, Cached) and (
      memory.policy is not None or not isinstance(memory.segments, Constant)
    ):
      raise ValueError(
        "`model` must have caches that keep every segment: got "
        f"{memory.segments} with policy {memory.policy}. Keep the whole state."
      )
