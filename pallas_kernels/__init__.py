"""Pallas kernels, imported as `memcache_jax.pallas_kernels`.

The folder stands beside the package and is installed inside it. Kernels import
jax only, are loaded when an op first runs one, and never look at the device
when imported. README.md lists them.
"""

__all__: list[str] = []
