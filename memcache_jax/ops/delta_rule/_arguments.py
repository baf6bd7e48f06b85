"""Checks of the arguments that the delta rules have in common."""

from collections.abc import Mapping

from memcache_jax.array_typing import Array
from memcache_jax.ops import _checks


def check(
  q: Array,
  k: Array,
  v: Array,
  *,
  gates: Mapping[str, tuple[Array | None, str]],
  state: Array | None,
  initial: Array | None,
  mask: Array | None,
  starts: Array | None,
  chunk_size: int,
) -> None:
  """Raises ValueError unless all of them fit together.

  Args:
    q: queries, like all others as the op got them.
    k: keys.
    v: values.
    gates: what else an op has per token: name -> (array or None, axes).
    state: the memory to go on from.
    initial: that of a new document.
    mask: which tokens exist.
    starts: which begin a document.
    chunk_size: tokens computed in parallel.
  """
  floats = {
    "q": (q, "b t n k"),
    "k": (k, "b t n k"),
    "v": (v, "b t n v"),
    **gates,
    "state": (state, "b n k v"),
    "initial": (initial, "n k v"),
  }
  flags = {"mask": (mask, "b t"), "starts": (starts, "b t")}
  _checks.check_shapes(floats | flags)
  _checks.check_floating(**{name: x for name, (x, _) in floats.items()})
  _checks.check_same_dtype(q=q, k=k, v=v)
  _checks.check_bool(mask=mask, starts=starts)
  _checks.check_positive(chunk_size=chunk_size)
