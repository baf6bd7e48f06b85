"""Records of `decode` as Markdown, and its bars as met or missed."""

from examples.benchmarks import machine, report
from examples.benchmarks.report import Bar

FLAT, FASTER = 1.3, 3.0


def markdown(records: list[dict]) -> str:
  """The tables of a run."""
  return "\n\n".join(
    [
      machine.sentence(records[0]),
      report.bars_table(bars(records), "one decode step"),
      table(records),
    ]
  )


def bars(records: list[dict]) -> list[Bar]:
  """That sparse selection is flat, and faster than reading all memories."""
  times = _times(records)
  contexts = sorted({context for *_, context in times})
  first, last = (contexts[0], contexts[-1]) if contexts else (0, 0)

  def ratio(above, below):
    if above not in times or below not in times:
      return None
    return times[above]["cpu_ms"] / times[below]["cpu_ms"]

  found = []
  for memory in ("linear", "dla"):
    ssc, grm = (memory, "ssc", last), (memory, "grm", last)
    found += [
      Bar(
        f"{memory}, ssc: time at {last} tokens over that at {first}",
        ratio(ssc, (memory, "ssc", first)),
        FLAT,
        False,
      ),
      Bar(
        f"{memory}, ssc: faster than grm at {last} tokens",
        ratio(grm, ssc),
        FASTER,
        True,
      ),
    ]
  return found


def table(records: list[dict]) -> str:
  """One row per layer: CPU ms per token, by context, and the last state."""
  times = _times(records)
  contexts = sorted({context for *_, context in times})
  head = ["layer", *(f"{context} tokens" for context in contexts), "state MiB"]
  lines = [head, ["---"] * len(head)]
  for memory, aggregate in dict.fromkeys(case[:2] for case in times):
    row = [times.get((memory, aggregate, context)) for context in contexts]
    name = memory if aggregate == "none" else f"{memory}, {aggregate}"
    cells = ["" if x is None else f"{x['cpu_ms']:.2f}" for x in row]
    sizes = [x["state_mib"] for x in row if x is not None]
    lines.append([name, *cells, f"{sizes[-1]:.1f}"])
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _times(records):
  return {
    (r["memory"], r["aggregate"], r["context"]): r
    for r in records
    if "context" in r
  }
