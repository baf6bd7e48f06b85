"""Models of this library in EleutherAI's lm-evaluation-harness.

Needs the extra `eval`, and nothing else of the library imports it.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from memcache_jax.array_typing import Array, Bool, Float, Int, State
from memcache_jax.decoding import stream
from memcache_jax.models import LanguageModel
from memcache_jax.ops import _checks
from memcache_jax.tasks import Tokenizer

# Options of `generate_until` that this model understands.
_OPTIONS = {
  "until",
  "max_gen_toks",
  "do_sample",
  "temperature",
  "top_k",
  "top_p",
}


class HarnessModel(TemplateLM):
  """A `LanguageModel` and its tokenizer, as the harness wants them.

  Texts are read through the model's state, piece by piece: whatever their
  length, nothing is cut off on the left, and the perplexity of a document is
  that of one pass over all of it, with no windows. A context that several
  continuations share, as in multiple choice, is read once.

  Args:
    model: the model.
    tokenizer: must add no marks of its own.
    prefix_token: id that stands before a text: the one that stood before the
      documents the model was trained on.
    batch_size: texts that are read together.
    piece: tokens that are read at a time; changes no result.
    max_new_tokens: tokens to generate at most, where a task does not say.

  Raises:
    ValueError: for arguments that do not fit the model.

  Example:
    >>> from flax import nnx
    >>> from lm_eval.api.instance import Instance
    >>> from memcache_jax.evaluation import HarnessModel
    >>> from memcache_jax.models import LanguageModel, ModelConfig
    >>> from memcache_jax.tasks import ByteTokenizer
    >>> model = LanguageModel(ModelConfig.tiny(), rngs=nnx.Rngs(0))
    >>> harness = HarnessModel(model, ByteTokenizer(), prefix_token=10)
    >>> request = Instance("loglikelihood", {}, ("2 + 2 =", " 4"), 0)
    >>> [(log_probability, greedy)] = harness.loglikelihood([request])
    >>> log_probability < 0
    True
  """

  def __init__(
    self,
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    prefix_token: int,
    batch_size: int = 8,
    piece: int = 256,
    max_new_tokens: int = 256,
  ):
    super().__init__()
    if not isinstance(model, LanguageModel):
      raise ValueError(f"`model` must be a LanguageModel: got {model!r}.")
    _checks.check_positive(
      batch_size=batch_size, piece=piece, max_new_tokens=max_new_tokens
    )
    vocab_size = model.config.vocab_size
    if tokenizer.vocab_size > vocab_size:
      raise ValueError(
        f"`tokenizer` must have at most the model's {vocab_size} ids: "
        f"got {tokenizer.vocab_size}."
      )
    if not 0 <= prefix_token < vocab_size:
      raise ValueError(
        f"`prefix_token` must be an id below {vocab_size}: got {prefix_token}."
      )
    self.model = model
    self.tokens_of = tokenizer
    self.batch_size = batch_size
    self.piece = piece
    self.max_new_tokens = max_new_tokens
    self._prefix = prefix_token

  @property
  def eot_token_id(self) -> int:
    """What the harness puts before a text that has no context."""
    return self._prefix

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Ids of a text, without marks."""
    del add_special_tokens, kwargs
    return [int(token) for token in self.tokens_of.encode(string)]

  def loglikelihood_rolling(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Log probability of whole texts, each in one pass from its prefix on."""
    del disable_tqdm
    texts = [text for (text,) in map(_arguments, requests)]
    pairs = [([self._prefix], self.tok_encode(text)) for text in texts]
    totals = [total for total, _ in self._score(pairs)]
    for request, total in zip(requests, totals, strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return totals

  def generate_until(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Continues texts up to a stop string, which is left out."""
    del disable_tqdm
    given = [_arguments(request) for request in requests]
    contexts = [self._context(text) for text, _ in given]
    options = [_options(asked, self.max_new_tokens) for _, asked in given]
    found: dict[int, str] = {}
    # Batches share their options, and are of similar length.
    order = sorted(
      range(len(requests)), key=lambda i: (str(options[i]), len(contexts[i]))
    )
    for batch in _batches(order, self.batch_size, lambda i: options[i]):
      texts = self._generate([contexts[i] for i in batch], options[batch[0]])
      found |= dict(zip(batch, texts, strict=True))
    texts = [found[i] for i in range(len(requests))]
    for request, text in zip(requests, texts, strict=True):
      self.cache_hook.add_partial("generate_until", request.args, text)
    return texts

  def _context(self, text: str) -> list[int]:
    return self.tok_encode(text) or [self._prefix]

  def _generate(self, prompts, options) -> list[str]:
    steps = stream(
      self.model,
      prompts,
      max_new_tokens=options.max_new_tokens,
      temperature=options.temperature,
      top_k=options.top_k,
      top_p=options.top_p,
      key=jax.random.key(0),
      length_multiple=self.piece,
    )
    written: list[list[int]] = [[] for _ in prompts]
    texts, done = [""] * len(prompts), [False] * len(prompts)
    for tokens in steps:
      for i, token in enumerate(tokens):
        if done[i] or token is None:
          continue
        written[i].append(token)
        text = self.tokens_of.decode(written[i])
        texts[i], done[i] = _cut(text, options.until)
      if all(done):
        break
    return texts

  def _loglikelihood_tokens(
    self,
    requests: list[tuple[Any, list[int], list[int]]],
    disable_tqdm: bool = False,
    **kwargs: Any,
  ) -> list[tuple[float, bool]]:
    del disable_tqdm, kwargs
    scores = self._score([(context, end) for _, context, end in requests])
    for (texts, _, _), score in zip(requests, scores, strict=True):
      if texts is not None:
        self.cache_hook.add_partial("loglikelihood", texts, score)
    return scores

  def _score(
    self, pairs: Sequence[tuple[list[int], list[int]]]
  ) -> list[tuple[float, bool]]:
    """Log probability of ends after contexts; whether each is the likeliest."""
    places: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(pairs):
      places.setdefault(tuple(context), []).append(i)
    scores: dict[int, tuple[float, bool]] = {}
    order = sorted(places, key=len)
    for batch in _batches(order, self.batch_size, lambda context: None):
      ends = [[pairs[i][1] for i in places[context]] for context in batch]
      room = max(map(len, batch)) + max(len(e) for row in ends for e in row)
      reader = _Reader(self.model, self.batch_size, self.piece, room)
      after = reader.read(reader.start(), [list(context) for context in batch])[
        0
      ]
      for turn in range(max(map(len, ends))):
        now = [row[turn] if turn < len(row) else [] for row in ends]
        _, totals, greedy = reader.read(after, now)
        for context, row, total, likeliest in zip(
          batch, ends, totals, greedy, strict=False
        ):
          if turn < len(row):
            scores[places[context][turn]] = (float(total), bool(likeliest))
    return [scores[i] for i in range(len(pairs))]


def _arguments(request: Instance) -> tuple[Any, ...]:
  return request.args  # which the harness declares as the empty tuple


class _Options(NamedTuple):
  until: tuple[str, ...]
  max_new_tokens: int
  temperature: float
  top_k: int | None
  top_p: float | None


def _options(given: dict[str, Any], max_new_tokens: int) -> _Options:
  """What a task asks for.

  Raises:
    ValueError: for an option that would be ignored.
  """
  if unknown := set(given) - _OPTIONS:
    raise ValueError(
      f"`gen_kwargs` may have {sorted(_OPTIONS)}: got {sorted(unknown)}."
    )
  until = given.get("until") or ()
  until = (until,) if isinstance(until, str) else tuple(until)
  sampled = given.get("do_sample", bool(given.get("temperature")))
  return _Options(
    until,
    given.get("max_gen_toks", max_new_tokens),
    float(given.get("temperature", 1.0)) if sampled else 0.0,
    given.get("top_k") if sampled else None,
    given.get("top_p") if sampled else None,
  )


def _cut(text: str, until: Iterable[str]) -> tuple[str, bool]:
  """The text before the first stop string, and whether there is one."""
  ends = [place for stop in until if (place := text.find(stop)) >= 0]
  return (text[: min(ends)], True) if ends else (text, False)


def _batches(items, size, kind):
  """Runs of at most `size` neighbours of one kind."""
  batch: list = []
  for item in items:
    if batch and (len(batch) == size or kind(item) != kind(batch[0])):
      yield batch
      batch = []
    batch.append(item)
  if batch:
    yield batch


class _Place(NamedTuple):
  """Where reading has come to.

  Attributes:
    logits: of the next token.
    state: of the model.
  """

  logits: Float[Array, "b vocab"]
  state: tuple[State, ...]


class _Reader:
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

  def start(self) -> _Place:
    """The place before the first token."""
    logits = jnp.zeros((self._batch, self._model.config.vocab_size))
    return _Place(logits, self._model.init_state(self._batch, self._room))

  def read(
    self, place: _Place, rows: Sequence[Sequence[int]]
  ) -> tuple[_Place, np.ndarray, np.ndarray]:
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
    place: _Place,
    tokens: Int[Array, "b c"],
    mask: Bool[Array, "b c"],
  ) -> tuple[_Place, Float[Array, " b"], Bool[Array, " b"]]:
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
    return _Place(after, state), total, jnp.all(likeliest | ~mask, axis=1)

  return read
