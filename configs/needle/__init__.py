"""A needle in a haystack of noise: `python -m examples.recall.main`."""
