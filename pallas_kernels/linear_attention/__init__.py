"""Cached linear attention: segments written and earlier ones read at once.

Kernels work on arrays with heads before tokens, whose layout needs no copies
on a TPU; `Operands` says which. The equations are in the README of the op,
`memcache_jax/ops/cached_linear_attention`.
"""

__all__: list[str] = []
