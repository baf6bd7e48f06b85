"""One network in fast memory: what it returns, and its gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..linear_attention.mosaic_tpu import dot

# References or arrays by name: weights [i o], and the bias [1 o] of each that
# has one; what else a network needs [1 x].
Arrays = Mapping[str, Any]
# The network, as a function of how an affine map is computed, given its name
# and input, of static parameters by name, and of its input.
Forward = Callable[..., jax.Array]


def read(
  forward: Forward, dtype: Any, network: Arrays, static: Arrays, x: jax.Array
) -> jax.Array:
  """Its output, of products with operands of a type."""

  def affine(name, x):
    out = dot(x.astype(dtype), network[name][...].astype(dtype))
    return add_bias(out, network, name)

  return forward(affine, {name: x[...] for name, x in static.items()}, x)


def pull(
  forward: Forward,
  dtype: Any,
  network: Arrays,
  static: Arrays,
  x: jax.Array,
  gate: jax.Array,
  d_read: jax.Array,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
  """Gradients of a gated read, which is computed anew.

  Args:
    forward: the network.
    dtype: of the operands of products.
    network: its weights and biases.
    static: its other parameters.
    x: its input [c k] float32.
    gate: with which each output is multiplied [c v].
    d_read: gradient of the gated output [c v] float32.

  Returns:
    Those of x, of the gates [c 1], of the network and of static parameters.
  """
  shifts = {
    name: jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
    for name, w in network.items()
    if not name.startswith("b")
  }

  def run(shifts, static, x):
    inputs = {}

    def affine(name, x):
      inputs[name] = x.astype(dtype)
      out = product(x, network[name][...].astype(dtype)) + shifts[name]
      return add_bias(out, network, name)

    return forward(affine, static, x), inputs

  static = {name: x[...] for name, x in static.items()}
  output, back, inputs = jax.vjp(run, shifts, static, x, has_aux=True)
  d_outputs, d_static, d_x = back(gate * d_read)
  d_network = {}
  for name, d in d_outputs.items():
    d_network[name] = dot(inputs[name], d.astype(dtype), (0, 0))
    if bias_name(name) in network:
      d_network[bias_name(name)] = jnp.sum(d, axis=0, keepdims=True)
  return d_x, jnp.sum(output * d_read, 1, keepdims=True), d_network, d_static


@jax.custom_vjp
def product(x, weight):
  return dot(x.astype(weight.dtype), weight)


# Derivatives are operands of the weights' dtype, too.
product.defvjp(
  lambda x, weight: (dot(x.astype(weight.dtype), weight), weight),
  lambda weight, d: (dot(d.astype(weight.dtype), weight, (1, 1)), None),
)


def add_bias(out, network: Arrays, name: str):
  bias = bias_name(name)
  return out + network[bias][...] if bias in network else out


def bias_name(name: str) -> str:
  return "b" + name[1:]
