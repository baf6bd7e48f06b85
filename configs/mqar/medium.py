"""80 pairs in 320 tokens: three heads, and sums of keys to select by.

More than a linear memory of three heads can hold, as 52 pairs are for the two
of `small`. With a head more, one that selects wrongly is made up for by the
others; and what is compared with a query is the sum of a segment's keys.

Command: python -m examples.recall.main --config=configs/mqar/medium.py
  e.g. with --config.memory=attention --config.aggregate=none to compare
Hardware: made for 2 CPU cores
Result: see examples/recall/RESULTS.md.
"""

import ml_collections

from configs.mqar import small


def get_config() -> ml_collections.ConfigDict:
  """What differs from `small`: the last rows, the heads, what is compared."""
  config = small.get_config()
  *before, (length, pairs, _) = config.task.stages
  config.task.stages = (*before, (length, pairs, 300), (320, 80, 450))
  config.task.vocab_size = 352
  config.pooling = "sum"
  config.dim = 48
  config.num_heads = 3
  return config
