"""Titans with memory as context (MAC), 1.3B: 1,445,100,096 parameters.

python -m examples.lm.main --config=configs/lm/titans_mac_1p3b.py --workdir=DIR

Hardware: a pod slice of 128 TPU v5e chips.
Not yet run.
"""

from ml_collections import ConfigDict

from configs.lm import paper


def get_config() -> ConfigDict:
  """The settings; see `examples.lm.settings`."""
  return paper.paper_1p3b("titans_mac")
