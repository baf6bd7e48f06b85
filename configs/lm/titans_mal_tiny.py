"""Titans with memory as layer (MAL), tiny: 121,224 parameters.

python -m examples.lm.main --config=configs/lm/titans_mal_tiny.py --workdir=DIR

Hardware: any machine, such as two CPU cores.
Not yet run.
"""

from ml_collections import ConfigDict

from configs.lm import paper


def get_config() -> ConfigDict:
  """The settings; see `examples.lm.settings`."""
  return paper.tiny("titans_mal", window=64)
