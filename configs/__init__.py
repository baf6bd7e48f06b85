"""Configurations of the examples; each says its command and its result."""
