"""Trains small models on recall tasks and measures what they remember."""
