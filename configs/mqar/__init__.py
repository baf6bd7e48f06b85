"""Multi-query associative recall: `python -m examples.recall.main`."""
