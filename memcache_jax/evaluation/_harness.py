"""A model and its tokenizer, as the harness wants them."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from memcache_jax.decoding import stream
from memcache_jax.evaluation import _generation
from memcache_jax.evaluation._reader import Reader
from memcache_jax.models import LanguageModel
from memcache_jax.ops import _checks
from memcache_jax.tasks import Tokenizer

_LOG = logging.getLogger(__name__)


class HarnessModel(TemplateLM):
  """A `LanguageModel` and its tokenizer, as the harness wants them.

  Texts are read through the model's state, piece by piece: whatever their
  length, nothing is cut off on the left, and the perplexity of a document is
  that of one pass over all of it, with no windows. A context that several
  continuations share, as in multiple choice, is read once. Only LongBench cuts
  prompts by definition; that is `longest_prompt`.

  Args:
    model: the model.
    tokenizer: must add no marks of its own.
    prefix_token: id that stands before a text: the one that stood before the
      documents the model was trained on.
    stop_tokens: ids that end what is generated, besides the prefix: the one
      that stood behind documents.
    batch_size: texts that are read together.
    piece: tokens that are read at a time; changes no result.
    max_new_tokens: tokens to generate at most, where a task does not say.
    longest_prompt: tokens that `generate_until` reads of a prompt; a longer one
      loses its middle, as in LongBench (arXiv 2308.14508), with a warning and a
      count. None reads everything.

  Attributes:
    cuts: how many tokens each prompt lost that was cut, by task.

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
    stop_tokens: Sequence[int] = (),
    batch_size: int = 8,
    piece: int = 256,
    max_new_tokens: int = 256,
    longest_prompt: int | None = None,
  ):
    super().__init__()
    if not isinstance(model, LanguageModel):
      raise ValueError(f"`model` must be a LanguageModel: got {model!r}.")
    _checks.check_positive(
      batch_size=batch_size, piece=piece, max_new_tokens=max_new_tokens
    )
    vocab_size = model.config.vocab_size
    if not isinstance(tokenizer, Tokenizer):
      raise ValueError(f"`tokenizer` must be a Tokenizer: got {tokenizer!r}.")
    if tokenizer.vocab_size > vocab_size:
      raise ValueError(
        f"`tokenizer` must have at most the model's {vocab_size} ids: "
        f"got {tokenizer.vocab_size}."
      )
    whole = isinstance(prefix_token, int) and not isinstance(prefix_token, bool)
    if not whole or not 0 <= prefix_token < vocab_size:
      raise ValueError(
        f"`prefix_token` must be an id below {vocab_size}: "
        f"got {prefix_token!r}."
      )
    if longest_prompt is not None:
      _checks.check_positive(longest_prompt=longest_prompt)
      if longest_prompt < 2:
        raise ValueError("`longest_prompt` must be at least 2 or None: got 1.")
    self.model = model
    self.tokens_of = tokenizer
    self.batch_size = batch_size
    self.piece = piece
    self.max_new_tokens = max_new_tokens
    self.longest_prompt = longest_prompt
    self.cuts: dict[str | None, list[int]] = {}
    self._prefix = prefix_token
    self._stop_tokens = (prefix_token, *stop_tokens)

  @property
  def eot_token_id(self) -> int:
    """What the harness puts before a text that has no context."""
    return self._prefix

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Ids of a text, without marks."""
    del add_special_tokens, kwargs
    tokens = [int(token) for token in self.tokens_of.encode(string)]
    vocab_size = self.model.config.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
      raise ValueError(
        f"`tokenizer` must give ids from 0 to {vocab_size - 1}: got {wrong[0]}."
      )
    return tokens

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
    contexts = self._contexts(requests)
    options = [
      _generation.options(asked, self.max_new_tokens) for _, asked in given
    ]
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

  def _contexts(self, requests: Sequence[Instance]) -> list[list[int]]:
    """Ids of the prompts, cut if that was asked for."""
    contexts, cut = [], []
    for request in requests:
      text, _ = _arguments(request)
      whole = self.tok_encode(text) or [self._prefix]
      contexts.append(_generation.without_middle(whole, self.longest_prompt))
      if lost := len(whole) - len(contexts[-1]):
        self.cuts.setdefault(request.task_name, []).append(lost)
        cut.append(lost)
    if cut:
      _LOG.warning(
        "%d of %d prompts are longer than %d tokens and lose %d from the "
        "middle",
        *(len(cut), len(requests), self.longest_prompt, sum(cut)),
      )
    return contexts

  def _generate(self, prompts, options) -> list[str]:
    steps = stream(
      self.model,
      prompts,
      max_new_tokens=options.max_new_tokens,
      temperature=options.temperature,
      top_k=options.top_k,
      top_p=options.top_p,
      stop_tokens=self._stop_tokens,
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
        texts[i], done[i] = _generation.before_stop(text, options.until)
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
    scores = self._score(
      [(context or [self._prefix], end) for _, context, end in requests]
    )
    for (texts, _, _), score in zip(requests, scores, strict=True):
      if texts is not None:
        self.cache_hook.add_partial("loglikelihood", texts, score)
    return scores

  def _score(
    self, pairs: Sequence[tuple[list[int], list[int]]]
  ) -> list[tuple[float, bool]]:
    """Log probability of ends after contexts; whether each is the likeliest."""
    # By context; one that is a prefix alone is not worth sharing a row for.
    places: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for i, (context, _) in enumerate(pairs):
      row = i if len(context) == 1 else -1
      places.setdefault((tuple(context), row), []).append(i)
    length = lambda row: (
      len(row[0]) + max(len(pairs[i][1]) for i in places[row])
    )
    scores: dict[int, tuple[float, bool]] = {}
    for rows in _batches(
      sorted(places, key=length), self.batch_size, lambda row: None
    ):
      reader = Reader(
        self.model, self.batch_size, self.piece, max(map(length, rows))
      )
      after, _, _ = reader.read(reader.start(), [row[0] for row in rows])
      for turn in range(max(len(places[row]) for row in rows)):
        asked = [places[row][turn : turn + 1] for row in rows]
        ends = [pairs[i[0]][1] if i else [] for i in asked]
        _, totals, greedy = reader.read(after, ends)
        for place, i in enumerate(asked):
          if i:
            scores[i[0]] = float(totals[place]), bool(greedy[place])
            _check_number(scores[i[0]][0], pairs[i[0]])
    return [scores[i] for i in range(len(pairs))]


def _check_number(score: float, pair: tuple[list[int], list[int]]) -> None:
  if math.isnan(score):
    context, end = map(len, pair)
    raise FloatingPointError(
      f"The logits of a text of {context} + {end} tokens are nan: it may be "
      "longer than the segments that a memory of the model knows."
    )


def _arguments(request: Instance) -> tuple[Any, ...]:
  return request.args  # which the harness declares as the empty tuple


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
