"""Whether `init_state`, `step` and `read` of a memory fit together."""

from typing import Any

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Gates, Params, State


def check_own(
  memory: Any,
  params: Params,
  initial: State,
  state: State,
  q: Float[Array, "b t n k"],
  k: Float[Array, "b t n k"],
  v: Float[Array, "b t n v"],
  gates: Gates,
) -> None:
  """Raises ValueError unless what a memory defines fits together.

  Args:
    memory: it.
    params: its parameters.
    initial: what its `init_state` returned.
    state: what it starts from.
    q: queries.
    k: keys.
    v: values.
    gates: what it asks for.
  """
  name = type(memory).__name__
  b, t = v.shape[:2]
  _check_initial(name, initial, b)
  if _described(state) != _described(initial):
    raise ValueError(
      f"`state` must be like what `init_state` of {name} returns for {t} "
      f"tokens, {_text(initial)}: got {_text(state)}. A memory whose states "
      "grow must override `scan`."
    )
  if t == 0:
    return

  def step(params, state, *tokens):
    first = jax.tree.map(lambda x: x[:, 0], tokens)
    return memory.step(params, state, *first)

  def read(params, state, q):
    return memory.read(params, memory.snapshot(state), q[:, :1])

  new = jax.eval_shape(step, params, initial, k, v, gates)
  if _described(new) != _described(initial):
    raise ValueError(
      f"`step` of {name} must return a state like that of `init_state`, "
      f"{_text(initial)}: got {_text(new)}."
    )
  y = jax.eval_shape(read, params, initial, q)
  expected = (b, 1, *v.shape[2:])
  if getattr(y, "shape", None) != expected:
    raise ValueError(
      f"`read` of {name} must return an array of shape {expected} for one "
      f"query: got {_text(y)}."
    )


def _check_initial(name, initial, b):
  for path, leaf in jax.tree_util.tree_leaves_with_path(initial):
    dtype, shape = jnp.result_type(leaf), jnp.shape(leaf)
    low = jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float32
    if low or shape[:1] != (b,):
      where = jax.tree_util.keystr(path)
      raise ValueError(
        f"`init_state` of {name} must return leaves in float32 with {b} rows "
        f"first: got {dtype} of shape {shape}{where and ' at ' + where}."
      )


def _described(tree):
  """What of a tree has to agree: its structure, shapes and dtypes."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]


def _text(tree):
  structure, leaves = _described(tree)
  leaves = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in leaves)
  return f"{structure} of [{leaves}]"
