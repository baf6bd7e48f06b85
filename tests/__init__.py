"""Tests. `pytest` runs all but tests/sharding, which is a run of its own."""
