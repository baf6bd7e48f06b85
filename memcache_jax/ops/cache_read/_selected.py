"""`selected_read`: checks and choice of implementation."""

from collections.abc import Callable
from typing import TypeAlias

from memcache_jax.array_typing import Array, Float, Int
from memcache_jax.ops import _checks, _dispatch
from memcache_jax.ops.cache_read import (
  _selected_kernels,
  _selected_tiles,
  _selected_triton,
)

Read: TypeAlias = Callable[..., Float[Array, "b t n v"]]

_NAME = "selected_read"


def selected_read(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  *,
  one_by_one: Read,
  implementation: _dispatch.Implementation | None = None,
) -> Float[Array, "b t n v"]:
  r"""Reads the few stored matrix memories that each token selected.

  .. math:: y_t = \sum_{i \in R_t} \gamma_{t,i}\, q_t S^{(i)}

  Memory Caching (arXiv 2602.24281), Eq. 16, for matrix memories in row
  vectors. What was not selected may be nan.

  Args:
    q: queries; float32 or bfloat16.
    states: stored memories, float32.
    index: which of them each token reads, without repetition; -1 for none.
    weights: the gate of each.
    one_by_one: the same of these four arrays, by reads of one state each: the
      "reference", and all there is for so few queries that nothing is shared.
    implementation: "mosaic_tpu", "triton" (for GPUs; compiled but not yet run
      on one), "xla", "reference", or None for the fastest on the platform the
      program is compiled for.

  Returns:
    y in float32.

  Raises:
    ValueError: when shapes or dtypes do not fit together.
    NotImplementedError: when the chosen implementation cannot take the call;
      on a second derivative, where it may run as a kernel: "xla" has those of
      any order, in reverse alone.
  """
  _checks.check_shapes(
    {
      "q": (q, "b t n k"),
      "states": (states, "b s n k v"),
      "index": (index, "b t n r"),
      "weights": (weights, "b t n r"),
    }
  )
  _checks.check_floating(q=q, states=states, weights=weights)
  _checks.check_integers(index=index)
  few = index.shape[1] * index.shape[3] <= states.shape[1]
  if implementation is None and few:
    implementation = "xla"  # no state is read by many: nothing to sort
  why_not = {}
  if implementation not in ("reference", "xla"):
    why_not = {
      "mosaic_tpu": _selected_kernels.why_not(q, states, index),
      "triton": _selected_triton.why_not(q, states, index),
    }
  choice = _dispatch.resolve(_NAME, implementation, why_not)
  if choice == "reference" or (choice == "xla" and few):
    return one_by_one(q, states, index, weights)
  if choice == "xla":
    return _selected_tiles.selected_read(q, states, index, weights)
  return _dispatch.run_spread(
    _NAME,
    choice,
    _selected_tiles.selected_read,
    {
      "mosaic_tpu": _selected_kernels.mosaic_tpu,
      "triton": _selected_triton.triton,
    },
    {
      "mosaic_tpu": _selected_kernels.mosaic_tpu_vjp,
      "triton": _selected_triton.triton_vjp,
    },
    (q, states, index, weights),
    ("b t n k", "b s n k v", "b t n r", "b t n r"),
    "b t n v",
  )
