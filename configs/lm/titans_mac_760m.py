"""Titans with memory as context (MAC), 760M: 1,042,676,736 parameters.

python -m examples.lm.main --config=configs/lm/titans_mac_760m.py --workdir=DIR

Hardware: a pod slice of 128 TPU v5e chips.
Not yet run.
"""

from ml_collections import ConfigDict

from configs.lm import paper


def get_config() -> ConfigDict:
  """The settings; see `examples.lm.settings`."""
  return paper.paper_760m("titans_mac")
