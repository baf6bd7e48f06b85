"""Training language models, from a laptop to a TPU pod; start at `train.py`."""
