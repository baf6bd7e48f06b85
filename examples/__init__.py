"""Runnable examples, from the root of a checkout: `python -m examples...`."""
