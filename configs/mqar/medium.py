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


def get_config() -> ml_collections.ConfigDict:
  """The fields of `examples.recall.settings.Settings`, and the seeds."""
  return ml_collections.ConfigDict(
    {
      "task": {
        "name": "mqar",
        "stages": (
          (16, 4, 400),
          (32, 8, 200),
          (64, 16, 150),
          (128, 32, 200),
          (208, 52, 300),
          (320, 80, 450),
        ),
        "vocab_size": 352,
        "random_fillers": False,
      },
      # The model.
      "memory": "linear",
      "aggregate": "gated_residual",
      "gate": "context",
      "selection": "hard",
      "pooling": "sum",
      "write_mode": "independent",
      "segment_length": 8,
      "dim": 48,
      "num_layers": 1,
      "num_heads": 3,
      "conv_width": 4,
      # The training.
      "seeds": (0, 1, 2),
      "batch_tokens": 4096,
      "learning_rate": 1e-2,
      "weight_decay": 0.0,
      "test_rows": 1024,
    }
  )
