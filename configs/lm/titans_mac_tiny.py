"""Titans with memory as context (MAC), tiny: 176,336 parameters.

python -m examples.lm.main --config=configs/lm/titans_mac_tiny.py --workdir=DIR

Hardware: any machine, such as two CPU cores.
Not yet run.
"""

from ml_collections import ConfigDict

from configs.lm import paper


def get_config() -> ConfigDict:
  """The settings; see `examples.lm.settings`."""
  return paper.tiny("titans_mac")
