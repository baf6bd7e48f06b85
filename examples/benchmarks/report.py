"""Records of a run as Markdown, and the bars as met or missed."""

from typing import NamedTuple

from examples.benchmarks.cases import INNER_BATCHES

BARE = "bare"
RIVAL = "memory-caching"
JAX_RIVAL = "jax-linear-attention"
ROWS = (
  "package",
  "layer",
  "memory",
  "inner_batch",
  "aggregate",
  "segment",
  "write_mode",
  "tokens",
)


class Bar(NamedTuple):
  """A ratio that has to be reached.

  Attributes:
    text: what is promised, in words.
    ratio: measured; None when a record is missing.
    limit: the bar.
    at_least: whether the ratio must not be below the limit, or not above.
  """

  text: str
  ratio: float | None
  limit: float
  at_least: bool

  def verdict(self) -> str:
    if self.ratio is None:
      return "not measured"
    met = (
      self.ratio >= self.limit if self.at_least else self.ratio <= self.limit
    )
    return "met" if met else "missed"


class Times:
  """CPU times in milliseconds, by case and mode."""

  def __init__(self, records: list[dict]):
    self.records = [record for record in records if "mode" in record]
    self._by_case = {_case(r) + (r["mode"],): r for r in self.records}

  def find(self, record: dict, mode: str, **changes) -> dict | None:
    """The record of a similar case."""
    return self._by_case.get(_case(record | changes) + (mode,))

  def ratio(
    self, above: dict | None, below: dict | None, of: str = "cpu_ms"
  ) -> float | None:
    if above is None or below is None or None in (above[of], below[of]):
      return None
    return above[of] / below[of]

  def over_plain(self, record: dict | None) -> float | None:
    """Our time over that of our own layer without a cache."""
    if record is None or record["package"] != "memcache_jax":
      return None
    plain = self.find(
      record,
      record["mode"],
      aggregate="none",
      segment=0,
      write_mode="independent",
    )
    return self.ratio(record, plain)

  def speedup(self, record: dict | None) -> float | None:
    """Time of memory-caching over ours, for the same function."""
    if record is None or record["package"] != "memcache_jax":
      return None
    # Its write mode changes nothing of what it does per token, and is timed
    # once; it has no counterpart of the full layer.
    theirs = self.find(
      record, record["mode"], package=RIVAL, write_mode="independent"
    )
    return self.ratio(theirs, record)


def bars(records: list[dict]) -> list[Bar]:
  """GRM over linear memory, segment 64, and the delta rule; longest."""
  times = Times(records)
  tokens = max((r["tokens"] for r in times.records), default=0)
  ours = {
    "package": "memcache_jax",
    "layer": BARE,
    "memory": "linear",
    "inner_batch": 0,
    "aggregate": "grm",
    "segment": 64,
    "write_mode": "independent",
    "tokens": tokens,
  }
  found = []
  for mode, limit in (("forward", 30.0), ("forward_backward", 50.0)):
    record = times.find(ours, mode)
    name = f"GRM, segment 64, {mode.replace('_', ' + ')}"
    found += [
      Bar(
        f"{name}, {tokens} tokens: faster than memory-caching",
        times.speedup(record),
        limit,
        True,
      ),
      Bar(
        f"{name}, {tokens} tokens: time over our plain linear attention",
        times.over_plain(record),
        5.0,
        False,
      ),
    ]
  delta = ours | {"memory": "gated_delta", "aggregate": "none", "segment": 0}
  mode = "forward_backward"
  found.append(
    Bar(
      f"Gated DeltaNet, forward + backward, {tokens} tokens: "
      f"time over {JAX_RIVAL}'s",
      times.ratio(
        times.find(delta, mode), times.find(delta, mode, package=JAX_RIVAL)
      ),
      1.5,
      False,
    )
  )
  return found


def deep_bars(records: list[dict]) -> list[Bar]:
  """The bars of deep memories, forward + backward."""
  times = Times(records)
  found, ours = [], {}
  for record in times.records:
    if record["package"] == "memcache_jax":
      key = (record["memory"], record["inner_batch"], record["aggregate"])
      ours[(*key, record["mode"])] = record
  mode = "forward_backward"
  # Reads that are delayed are what titans-pytorch has.
  for memory, name in (
    ("delayed_titans", "Titans, delayed"),
    ("titans", "Titans"),
  ):
    for inner_batch in INNER_BATCHES:
      record = ours.get((memory, inner_batch, "none", mode))
      theirs = record and times.find(
        record, mode, package="titans-pytorch", memory="titans"
      )
      what = f"titans-pytorch, inner batch {inner_batch}"
      found += [
        Bar(
          f"{name}: faster than {what}",
          times.ratio(theirs, record),
          2.0 if inner_batch == INNER_BATCHES[0] else 1.0,
          True,
        ),
        Bar(
          f"{name}: memory over that of {what}",
          times.ratio(record, theirs, "peak_mib"),
          0.5,
          False,
        ),
      ]
  for memory in ("titans", "dla"):
    record = ours.get((memory, 0, "grm", mode))
    found.append(
      Bar(
        f"{memory}, grm, segment 64: faster than {RIVAL}",
        times.speedup(record),
        20.0,
        True,
      )
    )
  return found


def sparse_bars(records: list[dict]) -> list[Bar]:
  """SSC next to GRM, forward + backward."""
  times = Times(records)
  mode, both = "forward_backward", {}
  for record in times.records:
    if record["mode"] == mode:
      both[record["aggregate"]] = record
  grm, ssc = both.get("grm"), both.get("ssc")
  return [
    Bar("faster than GRM", times.ratio(grm, ssc), 4.0, True),
    Bar(
      "memory over that of GRM",
      times.ratio(ssc, grm, "peak_mib"),
      1.0,
      False,
    ),
  ]


def bars_table(bars: list[Bar], about: str) -> str:
  lines = [
    f"| bar ({about}) | limit | measured | |",
    "|---|---|---|---|",
  ]
  for bar in bars:
    sign = "at least" if bar.at_least else "at most"
    measured = "" if bar.ratio is None else f"{bar.ratio:.2f}x"
    if bar.ratio is not None and bar.ratio >= 10:
      measured = f"{bar.ratio:.1f}x"
    lines.append(
      f"| {bar.text} | {sign} {bar.limit:g}x | {measured} | {bar.verdict()} |"
    )
  return "\n".join(lines)


def layer_table(records: list[dict], layer: str) -> str:
  """One row per case of a kind of layer; CPU times."""
  times = Times(records)
  compared = ["over plain"]
  if layer == BARE:
    compared.append(f"{RIVAL} / ours")
  head = ["tokens", "layer", "forward ms", *compared]
  head += ["forward + backward ms", *compared, "memory MiB", "first call s"]
  lines = [_row(head), _row(["---"] * len(head))]
  for forward in times.records:
    if forward["mode"] != "forward" or forward["layer"] != layer:
      continue
    both = times.find(forward, "forward_backward")
    cells = [str(forward["tokens"]), _name(forward)]
    for record in (forward, both):
      ratios = [times.over_plain(record), times.speedup(record)]
      cells += [_number(record, "cpu_ms")]
      cells += map(_times, ratios[: len(compared)])
    cells += [_number(both, "peak_mib"), _number(both, "first_call_s")]
    lines.append(_row(cells))
  return "\n".join(lines)


def agreement_table(records: list[dict]) -> str:
  lines = [
    "| caching | write mode | outputs | gradients |",
    "|---|---|---|---|",
  ]
  for record in records:
    if record.get("record") == "agreement":
      lines.append(
        f"| {record['aggregate']} | {record['write_mode']} "
        f"| {record['value']:.1e} | {record['gradient']:.1e} |"
      )
  return "\n".join(lines)


def _row(cells: list[str]) -> str:
  return f"| {' | '.join(cells)} |"


def _case(record: dict) -> tuple:
  return tuple(record[name] for name in ROWS)


def _name(record: dict) -> str:
  words = []
  if record["package"] != "memcache_jax":
    words.append(f"{record['package']} {record['version']}:")
  memory = record["memory"].replace("_", " ")
  if record["inner_batch"]:
    memory += f", inner batch {record['inner_batch']}"
  if record["aggregate"] != "none":
    memory += f", {record['aggregate']}, segment {record['segment']}"
  words.append(memory)
  if record["write_mode"] != "independent":
    words.append(f"({record['write_mode']})")
  return " ".join(words)


def _number(record: dict | None, name: str) -> str:
  value = None if record is None else record[name]
  if value is None:
    return ""
  return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _times(value: float | None) -> str:
  return "" if value is None else f"{value:.1f}x"
