"""A number in lines of noise (S-NIAH-1), trained short and measured long.

Command: python -m examples.recall.main --config=configs/needle/small.py
  e.g. with --config.aggregate=none to compare
Hardware: made for 2 CPU cores
Result: none yet. Up to 6,000 steps, which were tried, find the key and not the
  number: see examples/recall/RESULTS.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The fields of `examples.recall.settings.Settings`, and the seeds."""
  return ml_collections.ConfigDict(
    {
      # The task; beyond 256 tokens all lengths are new to the model.
      "task": {
        "name": "needle",
        "stages": ((128, 3000), (256, 1000)),
        "test_lengths": (128, 256, 512, 1024, 2048, 4096),
      },
      # The model.
      "memory": "linear",
      "aggregate": "gated_residual",
      "gate": "context",
      "selection": "hard",
      "write_mode": "independent",
      "segment_length": 16,
      "dim": 32,
      "num_layers": 1,
      "num_heads": 1,
      "conv_width": 4,
      # The training.
      "seeds": (0, 1, 2),
      "batch_tokens": 2048,
      "learning_rate": 1e-2,
      "weight_decay": 0.0,
      "test_rows": 256,
    }
  )
