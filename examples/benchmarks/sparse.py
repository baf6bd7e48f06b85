"""Times sparse selective caching next to reading all memories, in one run.

  python -m examples.benchmarks.sparse

As `layer`, whose arguments it takes, at the longest length only: 8192 tokens
in 128 segments unless said otherwise, where a token reads 2 of up to 127 cached
memories, or all of them.
"""

from examples.benchmarks import cases, layer, machine, report

LENGTHS = (8192,)


def main(argv: list[str] | None = None) -> None:
  arguments = layer.parse(argv, __doc__, LENGTHS)
  records = [machine.describe()]
  wanted = cases.sparse_cases(max(arguments.lengths))
  pythons = layer.find_pythons(arguments)
  records += layer.run_all(wanted, pythons, arguments.jobs)
  layer.write("sparse", records, markdown(records), arguments)


def markdown(records: list[dict]) -> str:
  """The tables of a run."""
  return "\n\n".join(
    [
      machine.sentence(records[0]),
      report.bars_table(
        report.sparse_bars(records), "SSC, top 2 of segment 64"
      ),
      report.layer_table(records, "bare"),
    ]
  )


if __name__ == "__main__":
  main()
