"""No time for a wrong result: a layer against its definition, by token.

The definition reads and writes one token per call, with the token-by-token
implementations of the ops, and is differentiated by `jax.grad`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from examples.benchmarks import layers
from examples.benchmarks.layers import Layer

# Relative root mean square of the difference, in float32.
LIMIT = 1e-4


class WrongResultError(SystemExit):
  """Ends the process with an error, so that nothing is timed."""


def errors(
  definition: Layer,
  params: PyTree,
  x: Float[Array, "b t d"],
  y: Float[Array, "b t d"],
  gradient: PyTree,
) -> dict[str, float]:
  """How far outputs and the gradients of the weights are off.

  Args:
    definition: the layer, with the definitions of its ops.
    params: its weights.
    x: its inputs.
    y: outputs to check.
    gradient: of `layers.loss` with respect to `params`, to check.
  """

  def loss(params, x):
    y = by_token(definition, params, x)
    return layers.loss(y), y

  # Less optimised: it runs only once.
  program = jax.jit(jax.grad(loss, has_aux=True)).lower(params, x)
  options: dict[str, str | bool] = {"xla_backend_optimization_level": "1"}
  wanted_gradient, wanted_y = program.compile(options)(params, x)
  return {
    "value": worst_error(y, wanted_y),
    "gradient": worst_error(gradient, wanted_gradient),
  }


def by_token(
  layer: Layer, params: PyTree, x: Float[Array, "b t d"], block: int = 64
) -> Float[Array, "b t d"]:
  """Calls a layer, or a whole model, once per token, carrying its state.

  Args:
    layer: the layer.
    params: its weights.
    x: the inputs.
    block: most tokens after which a state is kept for the gradient; those in
      between are computed anew.
  """
  b, tokens, d = x.shape
  block = math.gcd(block, tokens)

  def one(state, x):
    y, state = layer.apply(params, x[:, None], state)
    return state, y[:, 0]

  @jax.checkpoint
  def many(state, x):
    return jax.lax.scan(one, state, x)

  blocks = jnp.moveaxis(x, 1, 0).reshape(tokens // block, block, b, d)
  _, y = jax.lax.scan(many, layer.init_state(params, tokens), blocks)
  return jnp.moveaxis(y.reshape(tokens, *y.shape[2:]), 0, 1)


def worst_error(got: PyTree, want: PyTree) -> float:
  """The largest relative rms difference among the arrays of two trees."""

  def error(got, want):
    scale = jnp.maximum(jnp.linalg.norm(want.reshape(-1)), 1e-30)
    return jnp.linalg.norm((got - want).reshape(-1)) / scale

  errors = jax.tree.leaves(jax.tree.map(error, got, want))
  return float(jnp.max(jnp.stack(errors)))


def require_right(errors: dict[str, float]) -> None:
  """Raises WrongResultError when an error is above the limit, or nan."""
  wrong = {name: error for name, error in errors.items() if not error <= LIMIT}
  if wrong:
    raise WrongResultError(
      f"Not timed, because the result is wrong: relative errors {wrong}, "
      f"the limit is {LIMIT:g}."
    )
