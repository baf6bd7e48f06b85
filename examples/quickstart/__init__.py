"""Trains a small byte-level memory-cached language model in five minutes."""
