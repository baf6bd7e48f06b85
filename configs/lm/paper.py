"""The sizes and training of Memory Caching (arXiv 2602.24281), Table 6.

Where the paper is silent: warm-up over 2% of the steps, a last learning rate
of a tenth of the peak, betas 0.9 and 0.95, clipping at norm 1, documents
aligned to segments, inner batches of half a segment (shorter ones take longer,
see configs/README.md), and a backward pass that keeps what attention and
memories read and the weights of memories before inner batches.
"""

from dataclasses import replace

from ml_collections import ConfigDict

from examples.lm.settings import (
  DataSettings,
  MeshSettings,
  ModelSettings,
  OptimizerSettings,
  Settings,
)

_TOKENS_PER_STEP = 128 * 4096


def tiny(family: str, caching: str = "none", window: int = 2048) -> ConfigDict:
  """For a laptop, on the embedded novels."""
  return Settings(
    model=ModelSettings(
      family=family, caching=caching, hidden_dim=128, window=window
    ),
    optimizer=OptimizerSettings(peak=3e-3),
  ).to_config()


def paper_760m(family: str, caching: str = "none") -> ConfigDict:
  """24 blocks of width 1536; 30B tokens."""
  model = ModelSettings(dim=1536, num_layers=24, num_heads=16)
  return _paper(model, family, caching, tokens=30e9, peak=1.25e-3)


def paper_1p3b(family: str, caching: str = "none") -> ConfigDict:
  """18 blocks of width 2048; 100B tokens."""
  model = ModelSettings(dim=2048, num_layers=18, num_heads=8)
  return _paper(model, family, caching, tokens=100e9, peak=7e-4)


def _paper(
  model: ModelSettings, family: str, caching: str, tokens: float, peak: float
) -> ConfigDict:
  steps = round(tokens / _TOKENS_PER_STEP)
  return Settings(
    model=replace(
      model,
      family=family,
      caching=caching,
      vocab_size=32_000,
      segment_length=256,
      inner_batch=128,
      max_kept_bytes=2**30,
      dtype="bfloat16",
      remat="segments",
    ),
    data=DataSettings(
      path="data/fineweb/*.parquet",
      held_out=1000,
      tokenizer="data/tokenizer_32k.json",
      align=256,
    ),
    optimizer=OptimizerSettings(peak=peak, warmup=steps // 50),
    mesh=MeshSettings(fsdp=-1, tensor=2),
    steps=steps,
    batch_size=128,
    length=4096,
    evaluate_every=1000,
    evaluation_batches=16,
    save_every=500,
    log_every=20,
  ).to_config()
