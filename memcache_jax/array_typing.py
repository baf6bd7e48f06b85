"""The one alphabet of axis letters, and the array types that use it.

The same letters stand in shape annotations, einsum strings, name suffixes and
sharding fields:

  ======  =======================================================
  letter  axis
  ======  =======================================================
  b       batch rows, which never mix
  t       tokens of one call
  d       model width
  n       heads, which never mix inside a memory
  k       key and query width of a head
  v       value width of a head
  s       stored memories (cached segments, "slots")
  w       write window, tokens
  c, e    tokens of a chunk (rows, columns); speed only
  g       chunks or segments of one call, t = g * c
  f       feed-forward width
  h       hidden width of a memory that is an MLP
  vocab   vocabulary
  ======  =======================================================

Three lengths never share a name: ``chunk_size`` (tokens per parallel tile,
speed only), ``inner_batch`` (tokens whose inner gradient is taken at the same
weights, part of the model) and ``segment_length`` (tokens per cached memory,
part of the model).
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
from jaxtyping import (
  Array,
  Bool,
  Float,
  Int,
  PRNGKeyArray,
  PyTree,
  Shaped,
  UInt32,
)

# A pytree of arrays; what it holds is the business of the memory that owns it.
Params: TypeAlias = Any
State: TypeAlias = Any

# A field of a pytree: an array, or whatever stands for one while jax or the
# user maps over the tree. Its shape is checked where it is used.
Leaf: TypeAlias = Any

Gates: TypeAlias = Mapping[str, Shaped[Array, "..."]]
DType: TypeAlias = jax.typing.DTypeLike

__all__ = [
  "Array",
  "Bool",
  "DType",
  "Float",
  "Gates",
  "Int",
  "Leaf",
  "PRNGKeyArray",
  "Params",
  "PyTree",
  "Shaped",
  "State",
  "UInt32",
]
