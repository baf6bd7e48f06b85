"""Samba (with Mamba-2 memories), tiny: 104,196 parameters.

python -m examples.lm.main --config=configs/lm/samba_tiny.py --workdir=DIR

Hardware: any machine, such as two CPU cores.
"""

from ml_collections import ConfigDict

from configs.lm import paper


def get_config() -> ConfigDict:
  """The settings; see `examples.lm.settings`."""
  return paper.tiny("samba")
