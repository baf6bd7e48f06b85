"""A number in lines of noise (S-NIAH-1), trained short and measured long.

RetNet's memory forgets at a fixed rate; what of it is cached does not. One
layer is enough, whose convolutions see the colon from every digit: then each is
found by its place. The first rows have no noise, and are little more than the
number, twice: what is not found in 2,000 steps among noise is found there in
some hundreds. Then come rows of all lengths in turns, since one length after
the other is learned by forgetting the one before.

Command: python -m examples.recall.main --config=configs/needle/small.py
  e.g. with --config.aggregate=none to compare
Hardware: made for 2 CPU cores
Result: see examples/recall/RESULTS.md.
"""

import ml_collections

LENGTHS = (128, 512, 1024, 2048)  # of rows with noise, in turns


def get_config() -> ml_collections.ConfigDict:
  """The fields of `examples.recall.settings.Settings`, and the seeds."""
  return ml_collections.ConfigDict(
    {
      # The task; beyond 2048 tokens all lengths are new to the model.
      "task": {
        "name": "needle",
        "stages": (
          (48, False, 800),
          *((length, True, 5) for _ in range(20) for length in LENGTHS),
        ),
        "test_lengths": (128, 256, 512, 1024, 2048, 4096),
      },
      # The model.
      "memory": "retnet",
      "aggregate": "gated_residual",
      "gate": "context",
      "selection": "hard",
      "pooling": "mean",
      "write_mode": "independent",
      "segment_length": 16,
      "dim": 32,
      "num_layers": 1,
      "num_heads": 1,
      "conv_width": 10,
      # The training.
      "seeds": (0, 1, 2),
      "batch_tokens": 4096,
      "learning_rate": 1e-2,
      "weight_decay": 0.0,
      "test_rows": 256,
    }
  )
