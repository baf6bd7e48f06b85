"""The delta rule by chunks, whose memory stays in fast memory between them.

Kernels work on arrays with heads before tokens; `Operands` says which. The
equations are in the README of the op, `memcache_jax/ops/delta_rule`.
"""

__all__: list[str] = []
