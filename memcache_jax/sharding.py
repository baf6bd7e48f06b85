"""Rows on the devices where their tokens are."""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, PyTree, Shaped


def rows_like(tree: PyTree, like: Shaped[Array, "b ..."]) -> PyTree:
  """Spreads the first axis of every leaf as that of `like` is spread.

  Under a mesh with Explicit axes an array made from nothing, such as an empty
  state, belongs to no device, and cannot be carried along with arrays that
  do. Elsewhere the compiler decides, and the tree is returned as it is.
  """
  rows = spec_of(like)[0]
  if rows is None:
    return tree

  def spread(x):
    spec = spec_of(x)
    return x if spec[0] == rows else jax.reshard(x, jax.P(rows, *spec[1:]))

  return jax.tree.map(spread, tree)


def spec_of(x: Array) -> tuple[Any, ...]:
  """Mesh axes over which each axis of an array is spread; None for whole.

  Only Explicit axes are known; others are the compiler's business.
  """
  parts = tuple(getattr(jax.typeof(x).sharding, "spec", ()))
  return parts + (None,) * (jnp.ndim(x) - len(parts))


def beside(
  weight: Float[Array, "..."], x: Shaped[Array, "b t ..."]
) -> Float[Array, "..."]:
  """Gathers a weight over the mesh axes that spread rows and tokens of x.

  A mesh axis spreads weights so that they take less room, and is needed for
  tokens where they are used. Under Explicit axes that has to be said.
  """
  taken = {name for part in spec_of(x)[:2] for name in _names(part)}
  kept = [
    tuple(name for name in _names(part) if name not in taken) or None
    for part in spec_of(weight)
  ]
  if kept == [_names(part) or None for part in spec_of(weight)]:
    return weight
  return jax.reshard(weight, jax.P(*kept))


def _names(part: Any) -> tuple[str, ...]:
  """Of one entry of a spec."""
  if part is None:
    return ()
  return part if isinstance(part, tuple) else (part,)


def by_compiler(
  function: Callable[..., Array], *inputs: Array, spec: tuple[Any, ...]
) -> Array:
  """Calls a function whose communication the compiler finds.

  For what has no rule under Explicit axes.

  Args:
    function: of the inputs.
    *inputs: arrays.
    spec: how the result is spread.
  """
  if not any(spec) and not any(any(spec_of(x)) for x in inputs):
    return function(*inputs)
  spread = jax.sharding.auto_axes(function, out_sharding=jax.P(*spec))
  return cast(Array, spread(*inputs))


def zeros_at_tokens(
  like: Float[Array, "*tokens k"], width: int
) -> Float[Array, "*tokens v"]:
  """Zeros [*tokens width] in float32, spread over devices as `like` is."""
  nothing = like[..., :0].astype(jnp.float32)
  return jnp.einsum("...k,kv->...v", nothing, jnp.zeros((0, width)))


def devices_along(part: Any) -> int:
  """How many there are along the mesh axes of one entry of a spec."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(mesh.shape[name] for name in _names(part))


def spread_like(
  tree: PyTree, axes: PyTree, like: Shaped[Array, "..."], like_axes: str
) -> PyTree:
  """Spreads arrays as another one is, by the letters of their axes.

  Args:
    tree: arrays.
    axes: letters of each one's axes, such as "b t n k"; what spreads an axis of
      `like` spreads those of the same letter, and nothing else does.
    like: an array. Where it is not spread, the tree is returned as it is.
    like_axes: letters of its axes.
  """
  spread = _spread(like, like_axes)
  if not spread:
    return tree
  return jax.tree.map(jax.reshard, tree, _specs(axes, spread))


def _spread(x: Array, axes: str) -> dict[str, Any]:
  """Mesh axes by the letters of the axes that they spread."""
  parts = zip(axes.split(), spec_of(x), strict=True)
  return {letter: part for letter, part in parts if part}


def _specs(axes: PyTree, spread: dict[str, Any]) -> PyTree:
  one = lambda x: jax.P(*(spread.get(letter) for letter in x.split()))
  return jax.tree.map(one, axes)


def over_devices(
  function: Callable[..., PyTree],
  inputs: tuple[PyTree, ...],
  axes: tuple[PyTree, ...],
  output_axes: PyTree,
  *,
  letters: str = "bn",
) -> PyTree:
  """Runs a function on every device's own part, by default of rows and heads.

  A kernel is opaque to the compiler, which would gather its inputs. Rows and
  heads never mix, so each device can run it on those it holds. This needs a
  mesh with Explicit axes, whose arrays say how they are spread; with Auto axes
  the caller wraps the op in `jax.shard_map`.

  Args:
    function: of the inputs.
    inputs: arrays; the first leaf says how everything is spread.
    axes: letters of each input's axes, such as "b t n k".
    output_axes: likewise, of what the function returns.
    letters: those that may be spread.

  Raises:
    ValueError: when another axis is spread.
  """
  first, names = jax.tree.leaves(inputs)[0], jax.tree.leaves(axes)[0]
  spread = _spread(first, names)
  if not spread:
    return function(*inputs)
  if not spread.keys() <= set(letters):
    words = {"b": "rows (b)", "t": "tokens (t)", "n": "heads (n)"}
    said = " and ".join(words[letter] for letter in letters)
    raise ValueError(
      f"arrays may be spread over devices by {said} only: got axes "
      f"({names}) spread as {spec_of(first)}."
    )
  inputs = jax.tree.map(jax.reshard, inputs, _specs(axes, spread))
  # Unchecked: a simulated kernel does not say that its results vary.
  return jax.shard_map(
    function,
    in_specs=_specs(axes, spread),
    out_specs=_specs(output_axes, spread),
    check_vma=False,
  )(*inputs)
