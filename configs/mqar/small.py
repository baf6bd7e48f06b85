"""16 pairs in 64 tokens, after shorter rows with fewer pairs.

Command: python -m examples.recall.main --config=configs/mqar/small.py
  e.g. with --config.memory=attention --config.aggregate=none to compare
Hardware: made for 2 CPU cores
Result: not yet run.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The fields of `examples.recall.settings.Settings`, and the seeds."""
  return ml_collections.ConfigDict(
    {
      # The task.
      "stages": ((16, 4, 300), (32, 8, 300), (64, 16, 400)),
      "vocab_size": 128,
      "random_fillers": False,
      # The model.
      "memory": "linear",
      "aggregate": "gated_residual",
      "gate": "context",
      "write_mode": "independent",
      "segment_length": 8,
      "dim": 32,
      "num_layers": 2,
      "num_heads": 2,
      # The training.
      "seeds": (0, 1, 2),
      "batch_tokens": 4096,
      "learning_rate": 5e-3,
      "weight_decay": 0.1,
      "test_rows": 1024,
    }
  )
