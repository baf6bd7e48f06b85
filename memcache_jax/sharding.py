"""Rows on the devices where their tokens are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, PyTree, Shaped


def rows_like(tree: PyTree, like: Shaped[Array, "b ..."]) -> PyTree:
  """Spreads the first axis of every leaf as that of `like` is spread.

  Under a mesh with Explicit axes an array made from nothing, such as an empty
  state, belongs to no device, and cannot be carried along with arrays that
  do. Elsewhere the compiler decides, and the tree is returned as it is.
  """
  rows = _row_axes(like)
  if rows is None:
    return tree

  def spread(x):
    if _row_axes(x) == rows:
      return x
    return jax.reshard(x, jax.P(rows, *jax.typeof(x).sharding.spec[1:]))

  return jax.tree.map(spread, tree)


def _row_axes(x: Array):
  sharding = jax.typeof(x).sharding
  spec = getattr(sharding, "spec", None)
  return spec[0] if spec else None


def zeros_at_tokens(
  like: Float[Array, "*tokens k"], width: int
) -> Float[Array, "*tokens v"]:
  """Zeros [*tokens width] in float32, spread over devices as `like` is."""
  nothing = like[..., :0].astype(jnp.float32)
  return jnp.einsum("...k,kv->...v", nothing, jnp.zeros((0, width)))


def over_batch_and_heads(
  function: Callable[..., PyTree],
  inputs: tuple[PyTree, ...],
  axes: tuple[PyTree, ...],
  output_axes: PyTree,
) -> PyTree:
  """Runs a function on every device's own rows and heads.

  A kernel is opaque to the compiler, which would gather its inputs. Rows and
  heads never mix, so each device can run it on those it holds. This needs a
  mesh with Explicit axes, whose arrays say how they are spread; with Auto axes
  the caller wraps the op in `jax.shard_map`.

  Args:
    function: of the inputs.
    inputs: arrays; the first leaf says how rows and heads are spread.
    axes: letters of each input's axes, such as "b t n k".
    output_axes: likewise, of what the function returns.

  Raises:
    ValueError: when another axis than b and n is spread.
  """
  first, letters = jax.tree.leaves(inputs)[0], jax.tree.leaves(axes)[0].split()
  spec = getattr(jax.typeof(first).sharding, "spec", ())
  spread = {x: name for x, name in zip(letters, spec, strict=False) if name}
  if not spread:
    return function(*inputs)
  if not spread.keys() <= {"b", "n"}:
    raise ValueError(
      "a kernel's inputs may be spread over devices by rows (b) and heads (n) "
      f"only: got axes ({' '.join(letters)}) spread as {spec}."
    )

  def specs(axes):
    one = lambda x: jax.P(*(spread.get(letter) for letter in x.split()))
    return jax.tree.map(one, axes)

  inputs = jax.tree.map(jax.reshard, inputs, specs(axes))
  # Unchecked: a simulated kernel does not say that its results vary.
  return jax.shard_map(
    function,
    in_specs=specs(axes),
    out_specs=specs(output_axes),
    check_vma=False,
  )(*inputs)
