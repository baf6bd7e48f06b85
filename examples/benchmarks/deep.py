"""Times deep memories next to other packages, in one run.

  python -m examples.benchmarks.rivals   # once: installs them
  python -m examples.benchmarks.deep

As `layer`, whose arguments it takes, at the longest length only.
"""

from examples.benchmarks import cases, layer, machine, report


def main(argv: list[str] | None = None) -> None:
  arguments = layer.parse(argv, __doc__)
  records = [machine.describe()]
  wanted = cases.deep_cases(max(arguments.lengths))
  pythons = layer.find_pythons(arguments)
  records += layer.run_all(wanted, pythons, arguments.jobs)
  layer.write("deep", records, markdown(records), arguments)


def markdown(records: list[dict]) -> str:
  """The tables of a run."""
  return "\n\n".join(
    [
      machine.sentence(records[0]),
      report.bars_table(report.deep_bars(records), "forward + backward"),
      report.layer_table(records, "bare"),
    ]
  )


if __name__ == "__main__":
  main()
