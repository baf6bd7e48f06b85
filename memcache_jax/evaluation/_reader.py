"""Reads rows of tokens of any length, and scores them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memcache_jax.array_typing import Array, Bool, Float, Int, State
from memcache_jax.models import LanguageModel


class Place(NamedTuple):
  """Where reading has come to.

  Attributes:
    logits: of the next token.
    state: of the model.
  """

  logits: Float[Array, "b vocab"]
  state: tuple[State, ...]


class Reader:
  """Reads rows of any lengths, in pieces of one shape."""

  def __init__(
    self, model: LanguageModel, batch_size: int, piece: int, room: int
  ):
    leaves, treedef = jax.tree.flatten(model)
    self._read = functools.partial(_compiled(treedef), leaves)
    self._model, self._batch, self._piece = model, batch_size, piece
    # Few sizes, each of which is compiled once: powers of two of pieces.
    self._room = piece
    while self._room < room:
      self._room *= 2

  def start(self) -> Place:
    """The place before the first token."""
    logits = jnp.zeros((self._batch, self._model.config.vocab_size))
    return Place(logits, self._model.init_state(self._batch, self._room))

  def read(
    self, place: Place, rows: Sequence[Sequence[int]]
  ) -> tuple[Place, np.ndarray, np.ndarray]:
    """Goes on, and scores what it reads.

    Args:
      place: where to go on; stays as it is.
      rows: tokens, for the first rows of the batch.

    Returns:
      The place after, log probability of each row [b], and whether all of its
      tokens were the likeliest [b].
    """
    length = -(-max(map(len, rows)) // self._piece) * self._piece
    tokens = np.zeros((self._batch, length), np.int32)
    mask = np.zeros((self._batch, length), bool)
    for i, row in enumerate(rows):
      tokens[i, : len(row)] = row
      mask[i, : len(row)] = True
    total = np.zeros(self._batch)
    greedy = np.ones(self._batch, bool)
    for begin in range(0, length, self._piece):
      piece = slice(begin, begin + self._piece)
      place, part, likeliest = self._read(
        place, tokens[:, piece], mask[:, piece]
      )
      total += np.asarray(part, np.float64)
      greedy &= np.asarray(likeliest)
    return place, total, greedy


@functools.lru_cache(maxsize=8)
def _compiled(treedef: Any):
  """A jitted piece, of a model's leaves."""

  @jax.jit
  def read(
    leaves: list[Array],
    place: Place,
    tokens: Int[Array, "b c"],
    mask: Bool[Array, "b c"],
  ) -> tuple[Place, Float[Array, " b"], Bool[Array, " b"]]:
    model = jax.tree.unflatten(treedef, leaves)
    logits, state = model(tokens, place.state, mask=mask)
    # A token is predicted by the logits before it.
    before = jnp.concatenate([place.logits[:, None], logits[:, :-1]], axis=1)
    chosen = jnp.take_along_axis(before, tokens[..., None], axis=-1)[..., 0]
    scores = chosen - jax.nn.logsumexp(before, axis=-1)
    likeliest = jnp.argmax(before, axis=-1) == tokens
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    last = jnp.max(jnp.where(mask, index, -1), axis=1)
    after = jnp.take_along_axis(
      logits, jnp.maximum(last, 0)[:, None, None], axis=1
    )[:, 0]
    after = jnp.where((last >= 0)[:, None], after, place.logits)
    total = jnp.sum(jnp.where(mask, scores, 0.0), axis=1)
    return Place(after, state), total, jnp.all(likeliest | ~mask, axis=1)

  return read
