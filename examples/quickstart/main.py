"""Flags, and what goes wrong with them, in one line."""

import argparse
import pathlib
import sys
from typing import NoReturn

from examples.quickstart import data
from examples.quickstart.session import INTERRUPTED, WRONG_INPUT, run
from examples.quickstart.settings import Settings
from examples.workdir import InputError

COMMAND = "python -m examples.quickstart"


def main(arguments: list[str] | None = None) -> int:
  """Runs the quickstart; returns the exit code."""
  try:
    options = parse(arguments)
    corpus = data.load(options.text)
    settings = Settings(
      text_sha256=corpus.sha256, seed=options.seed, steps=options.steps
    )
    return run(settings, corpus, options.workdir, options.prompt)
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_INPUT
  except KeyboardInterrupt:
    print("\nInterrupted; the same command goes on.", file=sys.stderr)
    return INTERRUPTED


class _Parser(argparse.ArgumentParser):
  """Complains in one line."""

  def error(self, message: str) -> NoReturn:
    raise InputError(f"{message} (see {COMMAND} --help)")


def parse(arguments: list[str] | None) -> argparse.Namespace:
  """Reads the command line."""
  defaults = Settings("")
  parser = _Parser(
    prog=COMMAND,
    description="Trains a small byte-level language model with memory caching.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument(
    "--text",
    type=pathlib.Path,
    metavar="FILE",
    help="UTF-8 text to train on; the embedded novels if not given",
  )
  parser.add_argument(
    "--workdir",
    type=pathlib.Path,
    metavar="DIR",
    default=pathlib.Path("runs") / "quickstart",
    help="where the run lives; a run found there goes on",
  )
  parser.add_argument(
    "--steps",
    type=_positive,
    default=defaults.steps,
    help="training steps",
  )
  parser.add_argument(
    "--seed",
    type=_seed,
    default=defaults.seed,
    help="of the weights and the order of the data",
  )
  parser.add_argument(
    "--prompt",
    type=_not_empty,
    default="Anne looked at Captain Wentworth, ",
    help="what the generated text continues",
  )
  return parser.parse_args(arguments)


def _positive(text: str) -> int:
  return _integer(text, 1, 10**6)


def _seed(text: str) -> int:
  return _integer(text, 0, 2**31 - 1)


def _integer(text: str, low: int, high: int) -> int:
  try:
    value = int(text)
  except ValueError:
    value = low - 1
  if not low <= value <= high:
    raise argparse.ArgumentTypeError(
      f"must be an integer from {low:,} to {high:,}, got {text!r}"
    )
  return value


def _not_empty(text: str) -> str:
  if not text:
    raise argparse.ArgumentTypeError("must not be empty")
  try:
    text.encode()
  except UnicodeEncodeError:
    raise argparse.ArgumentTypeError("must be text in UTF-8") from None
  return text
