"""Generation: prompts in, tokens out, one compiled step for all of them."""

import functools
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from memcache_jax.array_typing import Array, Int, PRNGKeyArray
from memcache_jax.caching import Cached
from memcache_jax.decoding._sampling import Sampling
from memcache_jax.decoding._steps import decode_step, prefill
from memcache_jax.models import LanguageModel, check_token_ids
from memcache_jax.ops import _checks

Prompts: TypeAlias = (
  Int[Array, "b t"] | Int[np.ndarray, "b t"] | Sequence[Sequence[int] | Any]
)


def generate(
  model: LanguageModel,
  prompts: Prompts,
  *,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  stop_tokens: Sequence[int] = (),
  key: PRNGKeyArray | None = None,
  length_multiple: int = 1,
) -> list[list[int]]:
  """Continues prompts.

  Every token is read once: prompts in one call, then one token at a time from
  the state. The result is what recomputing the whole text for every token
  would give.

  Args:
    model: the model.
    prompts: ids, one sequence per row; they may differ in length.
    max_new_tokens: tokens to generate at most per row.
    temperature: divides the logits; 0 takes the likeliest token always.
    top_k: choose among this many likeliest tokens only; None for all.
    top_p: choose among the likeliest tokens that together reach this
      probability (after temperature and `top_k`); None for all.
    stop_tokens: ids that end a row.
    key: source of randomness; not needed at temperature 0.
    length_multiple: the padded prompts, and the room of the state, are
      rounded up to a multiple of it, so that texts of similar length share
      compiled code. Changes no result.

  Returns:
    The generated ids of each row, without the stop token.

  Raises:
    ValueError: for prompts or options that do not fit the model.
    FloatingPointError: when the logits of a row are not numbers.

  Example:
    >>> from flax import nnx
    >>> from memcache_jax.decoding import generate
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> rows = generate(
    ...   model, [[1, 2], [3]], max_new_tokens=3, temperature=0
    ... )
    >>> [len(row) for row in rows]
    [3, 3]
  """
  prompts = list(prompts) if isinstance(prompts, Iterator) else prompts
  rows = None
  for tokens in stream(
    model,
    prompts,
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    stop_tokens=stop_tokens,
    key=key,
    length_multiple=length_multiple,
  ):
    rows = [[] for _ in tokens] if rows is None else rows
    for row, token in zip(rows, tokens, strict=True):
      if token is not None:
        row.append(token)
  if rows is None:  # Every row stopped at once.
    rows = [[] for _ in prompts]
  return rows


def stream(
  model: LanguageModel,
  prompts: Prompts,
  *,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  stop_tokens: Sequence[int] = (),
  key: PRNGKeyArray | None = None,
  length_multiple: int = 1,
) -> Iterator[list[int | None]]:
  """Like `generate`, but hands tokens out as they come.

  Returns:
    An iterator over steps, each one id per row; None for a row that has
    stopped. It ends when every row has. Arguments are checked at the call.

  Example:
    >>> from flax import nnx
    >>> from memcache_jax.decoding import stream
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> steps = stream(model, [[1, 2]], max_new_tokens=3, temperature=0)
    >>> len([token for (token,) in steps])
    3
  """
  _checks.check_positive(
    max_new_tokens=max_new_tokens, length_multiple=length_multiple
  )
  if not isinstance(model, LanguageModel):
    raise ValueError(f"`model` must be a LanguageModel: got {model!r}.")
  sampling = Sampling(temperature, top_k, top_p)
  vocab_size = model.config.vocab_size
  if sampling.top_k is not None and sampling.top_k > vocab_size:
    raise ValueError(
      f"`top_k` must be at most the vocabulary, {vocab_size}: "
      f"got {sampling.top_k}."
    )
  if key is None:
    if sampling.temperature != 0:
      raise ValueError("`key` must be given unless `temperature` is 0.")
    key = jax.random.key(0)
  _check_key(key)
  stop = _stop_tokens(stop_tokens, vocab_size)
  prompts = _prompts(prompts, vocab_size)
  tokens, mask = _pad(prompts, length_multiple)
  _check_length(model, max(len(row) for row in prompts), max_new_tokens)
  room = _round_up(tokens.shape[1] + max_new_tokens, length_multiple)
  steps = _steps(model, tokens, mask, room, sampling, key)
  return _until_stopped(steps, stop, max_new_tokens)


def _until_stopped(
  steps: Iterator[Array], stop_tokens: frozenset[int], max_new_tokens: int
) -> Iterator[list[int | None]]:
  """Fetches tokens one step late, so that the device never waits."""
  pending = next(steps)
  stopped = [False] * pending.shape[0]
  for number in range(max_new_tokens):
    following = next(steps) if number + 1 < max_new_tokens else None
    tokens = np.asarray(pending).tolist()
    for row, token in enumerate(tokens):
      if token < 0 and not stopped[row]:
        raise FloatingPointError(
          f"The logits of row {row} are nan after {number} new tokens."
        )
      stopped[row] = stopped[row] or token in stop_tokens
    if all(stopped):
      return
    yield [
      None if done else token
      for done, token in zip(stopped, tokens, strict=True)
    ]
    pending = following


def _steps(model, tokens, mask, room, sampling, key) -> Iterator[Array]:
  """Chosen tokens [b], step by step, for ever."""
  leaves, treedef = jax.tree.flatten(model)
  compiled = _compiled(treedef, sampling)
  state = model.init_state(tokens.shape[0], room)
  chosen, state = compiled.prefill(leaves, tokens, mask, state, key, 0)
  number = 0
  while True:
    yield chosen
    number += 1
    chosen, state = compiled.step(leaves, chosen, state, key, number)


class _Compiled(NamedTuple):
  prefill: Callable
  step: Callable


@functools.lru_cache(maxsize=32)
def _compiled(treedef: Any, sampling: Sampling):
  """Jitted functions of a model's leaves: flattened once, not per token."""

  @functools.partial(jax.jit, donate_argnames="state")
  def first(leaves, tokens, mask, state, key, number):
    model = jax.tree.unflatten(treedef, leaves)
    logits, state = prefill(model, tokens, state, mask=mask)
    return sampling.choose(logits, jax.random.fold_in(key, number)), state

  @functools.partial(jax.jit, donate_argnames="state")
  def step(leaves, tokens, state, key, number):
    model = jax.tree.unflatten(treedef, leaves)
    logits, state = decode_step(model, tokens, state)
    return sampling.choose(logits, jax.random.fold_in(key, number)), state

  return _Compiled(first, step)


def _round_up(length: int, multiple: int) -> int:
  return -(-length // multiple) * multiple


def _check_key(key):
  """A key is an array: a typed scalar one, or the words of an old one."""
  if not isinstance(key, jax.Array | np.ndarray) or not (
    jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim == 0
    else key.shape in ((2,), (4,)) and key.dtype == jnp.uint32
  ):
    raise ValueError(
      f"`key` must be one key, as of jax.random.key: got {key!r}."
    )


def _stop_tokens(stop_tokens, vocab_size) -> frozenset[int]:
  if isinstance(stop_tokens, Iterable):
    ids = tuple(stop_tokens)
    if all(
      isinstance(token, numbers.Integral) and 0 <= int(token) < vocab_size
      for token in ids
    ):
      return frozenset(int(token) for token in ids)
  raise ValueError(
    f"`stop_tokens` must be ids from 0 to {vocab_size - 1}: "
    f"got {stop_tokens!r}."
  )


def _check_length(model, prompt, new):
  for spec in model.config.pattern:
    memory = getattr(spec, "memory", None)
    limit = memory.max_length if isinstance(memory, Cached) else None
    if limit is not None and prompt + new > limit:
      raise ValueError(
        f"`prompts` and `max_new_tokens` must come to at most {limit} tokens, "
        f"the segments that {memory} knows: got {prompt} + {new}."
      )


def _prompts(prompts, vocab_size) -> list[np.ndarray]:
  if isinstance(prompts, str) or not isinstance(prompts, Iterable):
    raise ValueError(
      f"`prompts` must be one sequence of ids per row: got {prompts!r}."
    )
  try:
    rows = [np.asarray(row) for row in prompts]
  except ValueError as error:  # a ragged row
    raise ValueError(
      "`prompts` must be one sequence of ids per row: got a row that is "
      "itself ragged."
    ) from error
  if not rows:
    raise ValueError("`prompts` must hold at least one prompt: got none.")
  for number, row in enumerate(rows):
    if row.ndim != 1 or row.size == 0:
      raise ValueError(
        "`prompts` must be sequences of at least one id: "
        f"got shape {row.shape} in row {number}."
      )
    check_token_ids(row, vocab_size, name="prompts")
  return rows


def _pad(rows, multiple):
  """Ids [b t] and a mask, or None where nothing is padded."""
  lengths = np.array([len(row) for row in rows])
  length = _round_up(int(lengths.max()), multiple)
  tokens = np.zeros((len(rows), length), np.int32)
  for padded, row in zip(tokens, rows, strict=True):
    padded[: len(row)] = row
  mask = np.arange(length)[None] < lengths[:, None]
  return tokens, None if mask.all() else mask
