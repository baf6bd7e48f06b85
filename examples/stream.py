"""Continues a text with a trained model, for ever if it is let.

  python -m examples.stream --model=runs/NAME/model < book.txt

Reads text of any length from a file or from standard input, then writes on
until the model ends the document, --tokens are written, or Ctrl-C. No text is
kept: the state of the model is all there is, and it never grows, as caches of
constant segments forget by a policy when they are full.
"""

import argparse
import contextlib
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TextIO

import jax
import numpy as np
from flax import nnx

from examples import functional
from examples.lm import export
from examples.lm.tokenizers import Tokenizer
from examples.workdir import InputError
from memcache_jax import caching
from memcache_jax.decoding import decode_step, prefill
from memcache_jax.models import AttentionSpec, LanguageModel

BLOCK = 256  # tokens read in one call
POLICIES = {
  "oldest": caching.DropOldest,
  "least-used": caching.KeepMostUsed,
  "merge": caching.MergeNeighbours,
  "thin": caching.LogarithmicThinning,
}


def main(argv: list[str] | None = None) -> None:
  arguments = parse(argv)
  try:
    if not arguments.temperature >= 0:
      raise InputError("--temperature must be at least 0")
    if arguments.tokens is not None and arguments.tokens < 0:
      raise InputError("--tokens must be at least 0")
    model, tokenizer = export.load(arguments.model)
    model = endless(model, POLICIES[arguments.forget](arguments.slots))
    path = arguments.text
    with path.open() if path else contextlib.nullcontext(sys.stdin) as file:
      ids = continuation(model, tokenizer, file, arguments)
      for text in texts(tokenizer, itertools.islice(ids, arguments.tokens)):
        print(text, end="", flush=True)
  except (InputError, OSError, ValueError) as error:
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    pass


def endless(model: LanguageModel, policy: caching.CachePolicy) -> LanguageModel:
  """The same weights, in a model whose state does not grow."""

  def bounded(spec):
    memory = getattr(spec, "memory", None)
    if isinstance(spec, AttentionSpec) and spec.window is None:
      raise InputError("a model with full attention cannot read for ever")
    if not isinstance(memory, caching.Cached):
      return spec
    if isinstance(memory.segments, caching.Logarithmic):
      return spec  # room for all there will ever be is little
    if type(memory.segments) is not caching.Constant:
      raise InputError("a model with explicit segments cannot read for ever")
    return replace(spec, memory=replace(memory, policy=policy))

  config = model.config
  config = replace(config, pattern=tuple(map(bounded, config.pattern)))
  return functional.with_params(config, nnx.state(model))


def continuation(
  model: LanguageModel, tokenizer: Tokenizer, file: TextIO, options
) -> Iterator[int]:
  """Ids that follow a text, for as long as they are asked for."""
  read = jax.jit(prefill, donate_argnames="state")
  step = jax.jit(decode_step, donate_argnames="state")
  state = model.init_state(batch=1, max_length=2**30)
  ids, logits = token_ids(tokenizer, file), None
  while block := list(itertools.islice(ids, BLOCK)):
    tokens = np.array([block + [0] * (BLOCK - len(block))], np.int32)
    mask = np.arange(BLOCK)[None] < len(block)
    logits, state = read(model, tokens, state, mask=mask)
  key = jax.random.key(options.seed)
  for number in itertools.count():
    logits = logits[:, : tokenizer.vocab_size]
    if np.isnan(logits).any():
      raise InputError("the model gives no numbers")
    token = logits.argmax(axis=-1)
    if options.temperature:
      now = jax.random.fold_in(key, number)
      token = jax.random.categorical(now, logits / options.temperature)
    if int(token[0]) == tokenizer.eos_id:
      return
    yield int(token[0])
    logits, state = step(model, token, state)


def token_ids(tokenizer: Tokenizer, file: TextIO) -> Iterator[int]:
  """Ids of a text, of which some lines are read at a time."""
  yield tokenizer.bos_id
  empty = True
  try:
    while lines := file.readlines(BLOCK):
      empty = False
      yield from tokenizer.encode("".join(lines)).tolist()
  except UnicodeDecodeError as error:
    raise InputError(f"the text is not one, of {error.encoding}") from error
  if empty:
    raise InputError("the text is empty: there is nothing to go on from")


def texts(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
  """What ids say, as soon as it is known; a character may take several."""
  before, new = [], []
  for token in ids:
    new.append(token)
    known, text = tokenizer.decode(before), tokenizer.decode(before + new)
    if text.endswith("\ufffd") and len(new) < 4:
      continue  # bytes of a character that is not complete
    yield text[len(known) :]
    # Some tokenizers leave out a space before the first id they are given.
    before, new = (before + new)[-8:], []


def parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("text", nargs="?", type=pathlib.Path, help="standard input by default")
  add("--model", type=pathlib.Path, required=True, help="a trained model")
  add("--tokens", type=int, help="to write at most; no end if not given")
  add("--temperature", type=float, default=0.8, help="0: the likeliest token")
  add("--seed", type=int, default=0)
  add("--forget", choices=POLICIES, default="oldest", help="of a full cache")
  add("--slots", type=int, default=64, help="memories of a layer's cache")
  return parser.parse_args(argv)


if __name__ == "__main__":
  main()
