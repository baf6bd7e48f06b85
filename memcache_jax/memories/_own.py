"""Whether `init_state`, `step` and `read` of a memory fit together."""

from typing import Any

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Array, Float, Gates, Params, State


def check_own(
  memory: Any,
  params: Params,
  initial: State,
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
    q: queries.
    k: keys.
    v: values.
    gates: what it asks for.
  """
  name = type(memory).__name__
  b, t = v.shape[:2]
  for path, leaf in jax.tree_util.tree_leaves_with_path(initial):
    dtype, shape = jnp.result_type(leaf), jnp.shape(leaf)
    low = jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float32
    if low or shape[:1] != (b,):
      raise ValueError(
        f"`init_state` of {name} must return leaves in float32 with {b} rows "
        f"first: got {dtype} of shape {shape} at "
        f"'{jax.tree_util.keystr(path)}'."
      )
  if t == 0:
    return

  def step(params, state, *tokens):
    first = jax.tree.map(lambda x: x[:, 0], tokens)
    return memory.step(params, state, *first)

  def read(params, state, q):
    return memory.read(params, memory.snapshot(state), q[:, :1])

  describe = lambda tree: jax.tree.map(
    lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree
  )
  state = jax.eval_shape(step, params, initial, k, v, gates)
  if describe(state) != describe(initial):
    raise ValueError(
      f"`step` of {name} must return a state like that of `init_state`, "
      f"{describe(initial)}: got {describe(state)}."
    )
  y = jax.eval_shape(read, params, initial, q)
  expected = (b, 1, *v.shape[2:])
  if getattr(y, "shape", None) != expected:
    raise ValueError(
      f"`read` of {name} must return an array of shape {expected} for one "
      f"query: got {describe(y)}."
    )
