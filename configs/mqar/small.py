"""52 pairs in 208 tokens, more than a linear memory of this width can hold.

One layer is enough: convolutions bring a key and its value together. Shorter
rows with fewer pairs come first, since what is hardly ever found in long rows
is found soon in short ones.

Command: python -m examples.recall.main --config=configs/mqar/small.py
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
          (208, 52, 450),
        ),
        "vocab_size": 224,
        "random_fillers": False,
      },
      # The model.
      "memory": "linear",
      "aggregate": "gated_residual",
      "gate": "context",
      "selection": "hard",
      "pooling": "mean",
      "write_mode": "independent",
      "segment_length": 8,
      "dim": 32,
      "num_layers": 1,
      "num_heads": 2,
      "conv_width": 4,
      # The training.
      "seeds": (0, 1, 2),
      "batch_tokens": 4096,
      "learning_rate": 1e-2,
      "weight_decay": 0.0,
      "test_rows": 1024,
    }
  )
