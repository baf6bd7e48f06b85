"""Everything, with the README brought up to date.

python -m examples.benchmarks.rivals   # once
python -m examples.benchmarks [the arguments of `layer`]
"""

import sys
from pathlib import Path

from examples.benchmarks import compile_time, decode, deep, layer

RESULTS = Path(__file__).with_name("results")


def main() -> None:
  out = RESULTS / "layer_cpu.jsonl"
  layer.main([f"--out={out}", "--readme", *sys.argv[1:]])
  out = RESULTS / "deep_cpu.jsonl"
  deep.main([f"--out={out}", "--readme", *sys.argv[1:]])
  out = RESULTS / "decode_cpu.jsonl"
  decode.main([f"--out={out}", "--readme"])
  out = RESULTS / "compile_time_cpu.jsonl"
  compile_time.main([f"--out={out}", "--readme"])


if __name__ == "__main__":
  main()
