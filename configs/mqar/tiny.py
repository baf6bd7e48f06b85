"""A run that shows that everything works, and nothing else.

Command: python -m examples.recall.main --config=configs/mqar/tiny.py
Hardware: 2 CPU cores
Result: an accuracy near chance; it trains for 2 steps.
"""

import ml_collections

from configs.mqar import small


def get_config() -> ml_collections.ConfigDict:
  """The sizes of `small`, made tiny."""
  config = small.get_config()
  config.task.stages = ((16, 2, 2),)
  config.task.vocab_size = 32
  config.dim = 16
  config.segment_length = 4
  config.seeds = (0, 1)
  config.batch_tokens = 64
  config.test_rows = 8
  return config
