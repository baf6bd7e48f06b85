"""Timings of the layers, next to those of other packages."""
