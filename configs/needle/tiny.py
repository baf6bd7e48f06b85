"""A run that shows that everything works, and nothing else.

Command: python -m examples.recall.main --config=configs/needle/tiny.py
Hardware: 2 CPU cores
Result: an accuracy of 0; it trains for 2 steps.
"""

import ml_collections

from configs.needle import small


def get_config() -> ml_collections.ConfigDict:
  """The sizes of `small`, made tiny."""
  config = small.get_config()
  config.task.stages = (
    (48, False, 1),
    (140, True, 1),
  )
  config.task.test_lengths = (140, 280)
  config.dim = 16
  config.seeds = (0, 1)
  config.batch_tokens = 280
  config.test_rows = 3
  return config
