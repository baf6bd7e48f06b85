"""What a compiled program costs, read from its text, loops multiplied out."""

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
  """

  cycles: int = 0
  collective_bytes: int = 0

  def __add__(self, other: "Costs") -> "Costs":
    return Costs(
      self.cycles + other.cycles, self.collective_bytes + other.collective_bytes
    )

  def __mul__(self, times: int) -> "Costs":
    return Costs(self.cycles * times, self.collective_bytes * times)


def costs(text: str) -> Costs:
  """Reads `compiled.as_text()`.

  Loops count as often as the compiler says they run, or once; branches of a
  conditional count each.
  """
  computations, entry = _computations(text)
  known: dict[str, Costs] = {}

  def of(name: str) -> Costs:
    if name not in known:
      known[name] = Costs()  # none contains itself
      total = Costs()
      for line in computations.get(name, ()):
        total += _line(line, of)
      known[name] = total
    return known[name]

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


def _line(line: str, of) -> Costs:
  cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
  total = Costs(int(cycles[1]) if cycles else 0, _collective_bytes(line))
  if body := re.search(r" while\(.*body=%?([\w.\-]+)", line):
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    total += of(body[1]) * (int(trips[1]) if trips else 1)
  elif callee := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
    total += of(callee[1])
  elif " conditional(" in line:
    for name in re.findall(r"computation[s]?=\{?([^}]*?)[},]", line):
      for branch in re.findall(r"%([\w.\-]+)", name):
        total += of(branch)
  return total


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
