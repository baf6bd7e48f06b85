"""Transformer++, tiny: 99,136 parameters.

python -m examples.lm.main --config=configs/lm/transformer_tiny.py --workdir=DIR

Hardware: any machine, such as two CPU cores.
"""

from ml_collections import ConfigDict

from configs.lm import paper


def get_config() -> ConfigDict:
  """The settings; see `examples.lm.settings`."""
  return paper.tiny("transformer")
