"""What a compiled program costs, read from its text, loops multiplied out."""

import functools
import re
from dataclasses import dataclass

_COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_BYTES = {
  "pred": 1,
  "s8": 1,
  "u8": 1,
  "bf16": 2,
  "f16": 2,
  "s16": 2,
  "u16": 2,
  "f32": 4,
  "s32": 4,
  "u32": 4,
  "f64": 8,
  "s64": 8,
  "u64": 8,
}


@dataclass(frozen=True)
class Costs:
  """Sums over one run of a program, on one device.

  Attributes:
    cycles: the compiler's estimates, without waiting for data.
    collective_bytes: sizes of what collectives give.
    kernels: runs of kernels of which the compiler has no estimate.
  """

  cycles: int = 0
  collective_bytes: int = 0
  kernels: int = 0

  def __add__(self, other: "Costs") -> "Costs":
    return Costs(
      self.cycles + other.cycles,
      self.collective_bytes + other.collective_bytes,
      self.kernels + other.kernels,
    )

  def __mul__(self, times: int) -> "Costs":
    return Costs(
      self.cycles * times, self.collective_bytes * times, self.kernels * times
    )


def costs(text: str) -> Costs:
  """Reads the text of a compiled program.

  Loops count as often as they run, or once where that cannot be read; branches
  of a conditional count each.
  """
  computations, entry = _computations(text)

  @functools.cache
  def of(name: str) -> Costs:
    total, channels = Costs(), _collectives(computations, name)
    for line in computations.get(name, ()):
      total += Costs(cycles=_cycles(line), kernels=_kernels(line))
      for callee, times in _callees(computations, line):
        total += of(callee) * times
    return total + Costs(collective_bytes=sum(channels.values()))

  return of(entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  found: dict[str, list[str]] = {}
  entry, lines = "", []
  for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
    if head and not line.startswith(" "):
      lines = found.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    else:
      lines.append(line)
  return found, entry


def _cycles(line: str) -> int:
  found = re.search(r'"estimated_cycles":"(\d+)"', line)
  return int(found[1]) if found else 0


def _kernels(line: str) -> int:
  kernel = 'custom_call_target="tpu_custom_call"' in line
  return int(kernel and not _cycles(line))


def _callees(computations, line: str) -> list[tuple[str, int]]:
  """What a line runs, and how often; fusions are in its own cycles."""
  if loop := re.search(
    r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line
  ):
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    times = int(known[1]) if known else _trips(computations.get(loop[1], []))
    return [(loop[2], times)]
  if call := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
    return [(call[1], 1)]
  if " conditional(" in line:
    return [
      (name, 1)
      for names in re.findall(r"_computations?=(\{[^}]*|[^,]*)", line)
      for name in re.findall(r"%([\w.\-]+)", names)
    ]
  return []


def _trips(condition: list[str]) -> int:
  """Of a loop that counts from 0 while below a constant; else 1."""
  text = "\n".join(condition)
  bound = re.search(r"compare\(%[\w.\-]+, %([\w.\-]+)\), direction=LT", text)
  if not bound:
    return 1
  value = re.search(rf"%{re.escape(bound[1])} = .* constant\((\d+)\)", text)
  return int(value[1]) if value else 1


def _collectives(computations, name: str) -> dict[str, int]:
  """Bytes by channel, also of those that fusions or other cores carry along.

  A collective that overlaps several fusions is written in each of them.
  """
  found = {}
  for line in computations.get(name, ()):
    if size := _collective_bytes(line):
      channel = re.search(r"channel_id=(\d+)", line)
      found[channel[1] if channel else line] = size
    inner = r" (?:fusion|async-start)\(.*calls=%?([\w.\-]+)"
    if carrier := re.search(inner, line):
      found |= _collectives(computations, carrier[1])
  return found


def _collective_bytes(line: str) -> int:
  """Bytes of the result; those of a pair of start and done count once."""
  pattern = rf"= (.*?) ({'|'.join(_COLLECTIVES)})(-start)?\("
  found = re.search(pattern, line)
  if not found:
    return 0
  sizes = []
  for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", found[1]):
    size = _BYTES.get(kind, 4)
    for length in filter(None, shape.split(",")):
      size *= int(length)
    sizes.append(size)
  # A start gives its operand back too.
  return max(sizes, default=0) if found[3] else sum(sizes)
