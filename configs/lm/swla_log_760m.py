"""SWLA with Log-Linear++, 760M: 844,200,960 parameters.

python -m examples.lm.main --config=configs/lm/swla_log_760m.py --workdir=DIR

Hardware: a pod slice of 256 TPU v5e chips.
Not yet run.
"""

from ml_collections import ConfigDict

from configs.lm import paper


def get_config() -> ConfigDict:
  """The settings; see `examples.lm.settings`."""
  return paper.paper_760m("swla", "log")
