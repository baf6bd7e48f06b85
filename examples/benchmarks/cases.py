"""What is timed: one configuration of one package, and the lists of them."""

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Literal

# Every case: float32, one row, one thread.
BATCH = 1
DIM = 128
HEADS = 4
# Bias of the learned decays: half of a value is left after some 40 tokens.
LONG = 4.0
# For rivals as for us; the loss is the mean of the squared outputs.
MODES = ("forward_backward", "forward")
# Of Titans, next to titans-pytorch.
INNER_BATCHES = (16, 64, 256)

WORKERS = {
  "memcache_jax": "examples.benchmarks.ours",
  "memory-caching": "examples.benchmarks.rival_memory_caching",
  "titans-pytorch": "examples.benchmarks.rival_titans_pytorch",
  "jax-linear-attention": "examples.benchmarks.rival_jax_linear_attention",
}


@dataclass(frozen=True)
class Case:
  """One layer at one length, timed in a process of its own.

  Attributes:
    package: whose layer it is.
    layer: "bare": projections q, k, v, o and those of the gates around the
      memory, nothing else. "mixer": the library's full layer.
    memory: what is written: "linear", "gated_delta", "titans" or "dla";
      "delayed_titans" reads what was before the token's inner batch.
    inner_batch: tokens whose inner gradients are taken at the same weights,
      for deep memories: titans-pytorch's chunk; 0 for the library's default.
    aggregate: how cached memories are read; "none" is a memory without cache.
    segment: tokens per cached memory; 0 without a cache.
    write_mode: whether each segment starts from the initial memory.
    tokens: length of the sequence.
  """

  package: str = "memcache_jax"
  layer: str = "bare"
  memory: Literal[
    "linear", "gated_delta", "titans", "delayed_titans", "dla"
  ] = "linear"
  inner_batch: int = 0
  aggregate: str = "none"
  segment: int = 0
  write_mode: Literal["independent", "checkpoint"] = "independent"
  tokens: int = 2048

  def arguments(self) -> list[str]:
    """The case as command-line arguments of a worker."""
    items = asdict(self).items()
    return [f"--{name.replace('_', '-')}={value}" for name, value in items]


def parse(
  parser: argparse.ArgumentParser, package: str, argv: list[str] | None = None
) -> tuple[Case, argparse.Namespace]:
  """Adds the arguments of a case and of its process, and parses them."""
  default = Case(package=package)
  for name, value in asdict(default).items():
    flag = f"--{name.replace('_', '-')}"
    parser.add_argument(flag, type=type(value), default=value)
  parser.add_argument("--core", type=int, help="the core to stay on")
  arguments = parser.parse_args(argv)
  names = asdict(default)
  return Case(**{name: getattr(arguments, name) for name in names}), arguments


def layer_cases(lengths: tuple[int, ...]) -> list[Case]:
  """Everything `python -m examples.benchmarks.layer` times, in order.

  All lengths have what the bars are about; the slow rivals, which take half a
  minute for a few calls, are not run for everything at the longest.
  """
  cases = []
  lengths = tuple(sorted(lengths))
  for place, tokens in enumerate(lengths, start=1):
    to_end = len(lengths) - place
    plain = Case(tokens=tokens)
    grm = replace(plain, aggregate="grm", segment=64)
    others = [replace(grm, aggregate=name) for name in ("residual", "ssc")]
    bare = [plain, grm, replace(grm, segment=256)]
    mixers = [plain, grm]
    rivals = [grm, replace(grm, segment=256)]
    if to_end <= 1:
      bare += others
    if to_end == 1:
      rivals += others
    if to_end == 0:
      bare.append(replace(grm, write_mode="checkpoint"))
      mixers += others
    delta = replace(plain, memory="gated_delta")
    cases += [*bare, delta]
    cases += [replace(case, layer="mixer") for case in mixers]
    cases += [replace(case, package="memory-caching") for case in rivals]
    cases.append(_titans(tokens, 64, package="titans-pytorch"))
    for case in (plain, delta):
      cases.append(replace(case, package="jax-linear-attention"))
  return cases


def deep_cases(tokens: int) -> list[Case]:
  """Everything `python -m examples.benchmarks.deep` times, in order."""
  cases = []
  for inner_batch in INNER_BATCHES:
    ours = _titans(tokens, inner_batch)
    delayed = replace(ours, memory="delayed_titans")
    cases += [ours, delayed, replace(ours, package="titans-pytorch")]
  for memory in ("titans", "dla"):
    grm = Case(memory=memory, aggregate="grm", segment=64, tokens=tokens)
    cases += [
      replace(grm, aggregate="none", segment=0),
      grm,
      replace(grm, package="memory-caching"),
    ]
  return cases


def sparse_cases(tokens: int) -> list[Case]:
  """Everything `python -m examples.benchmarks.sparse` times, in order."""
  grm = Case(aggregate="grm", segment=64, tokens=tokens)
  return [Case(tokens=tokens), grm, replace(grm, aggregate="ssc")]


def _titans(tokens: int, inner_batch: int, package="memcache_jax") -> Case:
  return Case(
    package=package, memory="titans", inner_batch=inner_batch, tokens=tokens
  )
