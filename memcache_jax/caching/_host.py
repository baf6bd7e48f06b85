"""Arrays in the memory of the host, of which a step needs a little."""

from collections.abc import Callable

import jax
from jax.experimental.compute_on import compute_on

from memcache_jax.array_typing import Array, PyTree, Shaped


def is_on_host(tree: PyTree) -> bool:
  """Whether the arrays are in the memory of the host, to which types attest."""
  space = jax.memory.Space.Host
  return any(
    getattr(jax.typeof(x), "memory_space", None) == space
    for x in jax.tree.leaves(tree)
  )


def to_device(tree: PyTree) -> PyTree:
  """Copies what is on the host to the device."""
  return jax.tree.map(
    lambda x: (
      jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x
    ),
    tree,
  )


def where_it_lies(
  function: Callable[..., Shaped[Array, "..."]],
  x: Shaped[Array, "..."],
  *others: Shaped[Array, "..."],
) -> Shaped[Array, "..."]:
  """Calls a function of a large array and small ones, next to the large one."""
  if not is_on_host(x):
    return function(x, *others)
  others = jax.device_put(others, jax.memory.Space.Host)
  return compute_on("device_host")(jax.jit(function))(x, *others)


def check_on_device(state: PyTree, to: str) -> None:
  """Raises ValueError for a state of which a part is on the host.

  Args:
    state: any.
    to: what it is needed for, as a verb.
  """
  if is_on_host(state):
    raise ValueError(
      f"`state` must be on the device to {to}: got one on the host. Call "
      "`decoding.to_device`."
    )
