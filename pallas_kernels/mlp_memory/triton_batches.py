"""Inner batches of a network that is trained as it reads, on a GPU.

A program takes all inner batches of one head. Weights and momentum stay in its
registers from the first batch to the last one: a network must be small.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.operands import like
from ..linear_attention.tiles import Span, call, dot, load, store, whole
from .batches import FRESH, FULL, USED, Arrays, Network
from .config import BatchesTritonConfig
from .network import bias_name


class Operands(NamedTuple):
  """g batches, of r tokens that are read and e that are written.

  Attributes:
    tokens: "q" [g b n r k], "k" [g b n e k] and "v" [g b n e v], of one dtype.
    marks: bits of each batch, see `FRESH` and those after it [g b n].
    coefficients: how much each row reads: "write" of each gradient
      [g b n r e], "decay" of the weights before and "carry" of the momentum
      before [g b n r]. After the batch: "last" and "momentum_write", weights of
      each gradient in the weights and in the momentum [g b n e]; "end_decay",
      "end_carry" and "momentum_decay", of what was before [g b n]. Those that
      there are, float32.
    static: parameters that all tokens share [b 1 n v] float32.
    initial: weights that a document starts with [b 1 n ...]; empty where none
      starts.
    carry: "theta", "momentum" and "start", those that there are: weights
      [b 1 n i o] and biases [b 1 n o], float32. The first batch alone may go on
      with one that started with other weights than those before its tokens.
  """

  tokens: Arrays
  marks: jax.Array
  coefficients: Arrays
  static: Arrays
  initial: Arrays
  carry: dict[str, Arrays]


class Plan(NamedTuple):
  """What the kernel knows about its call.

  Attributes:
    network: the memory.
    rows: of a batch, that are read.
    columns: those that are written.
    widths: of keys and values.
    batches: of the call.
    interpret: run without a GPU.
  """

  network: Network
  rows: Span
  columns: Span
  widths: tuple[Span, Span]
  batches: int
  interpret: bool

  def dot(self, a, b, *contract):
    return dot(a, b, contract, self.interpret)

  def weights(self, refs) -> Arrays:
    return {
      name: load(ref, 0, *self._sides(name)) for name, ref in refs.items()
    }

  def store(self, refs, weights: Arrays) -> None:
    for name, ref in refs.items():
      store(ref, weights[name], 0, *self._sides(name))

  def _sides(self, name):
    sides = {}
    for weight, (i, o) in self.network.maps.items():
      sides |= {weight: (whole(i), whole(o)), bias_name(weight): (whole(o),)}
    return sides[name]


class Keys(NamedTuple):
  """Of a batch, by map.

  Attributes:
    inputs: of the map [e i], as operands.
    descent: how the loss falls with what it returns [e o].
  """

  inputs: Arrays
  descent: Arrays


def fwd(
  network: Network,
  operands: Operands,
  *,
  config: BatchesTritonConfig,
  interpret: bool = False,
) -> tuple[jax.Array, dict[str, Arrays]]:
  """Reads of all tokens, and what is carried on.

  Args:
    network: the memory.
    operands: see there.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    y [g b n r v] float32, and `Operands.carry` after the last batch.
  """
  q, v = operands.tokens["q"], operands.tokens["v"]
  g, b, n, r, k = q.shape
  plan = Plan(
    network,
    rows=whole(r),
    columns=whole(v.shape[3]),
    widths=(whole(k), whole(v.shape[4])),
    batches=g,
    interpret=interpret,
  )
  carry = {
    kind: {name: like(q, *x.shape) for name, x in weights.items()}
    for kind, weights in operands.carry.items()
  }
  out = call(
    functools.partial(_kernel, plan=plan),
    "memcache_mlp_memory_batches",
    (1, 1, n, b),
    {
      "blocks": {
        **operands.tokens,
        **operands.coefficients,
        "marks": operands.marks,
      },
      "static": operands.static,
      "initial": operands.initial,
      "carry": operands.carry,
    },
    {"blocks": {"y": like(q, g, b, n, r, v.shape[4])}, "carry": carry},
    config=config,
    interpret=interpret,
  )
  return out["blocks"]["y"], out["carry"]


def _kernel(x, out, *, plan: Plan):
  key, value = plan.widths
  blocks, carry = x["blocks"], x["carry"]
  static = {
    name: load(ref, 0, value)[None] for name, ref in x["static"].items()
  }

  def batch(g, now):
    marks = load(blocks["marks"], g)
    now = _begin(x, out, marks, now, plan)
    base, start = _start(x, g, marks, now["theta"], plan)
    coefficients = _coefficients(blocks, g, plan)
    k = load(blocks["k"], g, plan.columns, key)
    v = load(blocks["v"], g, plan.columns, value)
    keys = _keys(static, start, k, v, plan)
    y = plan.network.forward(
      functools.partial(
        _read, base, now.get("momentum"), coefficients, keys, plan
      ),
      static,
      load(blocks["q"], g, plan.rows, key).astype(jnp.float32),
    )
    store(out["blocks"]["y"], y, g, plan.rows, value)
    now = _after(base, now.get("momentum"), coefficients, keys, plan)
    if "start" in carry:
      pl.when(marks & FULL != 0)(
        lambda: plan.store(out["carry"]["start"], now["theta"])
      )
    return now

  if "start" in carry:
    plan.store(out["carry"]["start"], plan.weights(carry["start"]))
  now = {
    kind: plan.weights(refs) for kind, refs in carry.items() if kind != "start"
  }
  now = jax.lax.fori_loop(0, plan.batches, batch, now)
  for kind, weights in now.items():
    plan.store(out["carry"][kind], weights)


def _begin(x, out, marks, now, plan: Plan):
  """What is carried into a batch, where a document may begin."""
  if not x["initial"]:
    return now
  fresh = marks & FRESH != 0
  new = {name: jax.tree.map(jnp.zeros_like, x) for name, x in now.items()}
  now = jax.lax.cond(
    fresh, lambda: new | {"theta": plan.weights(x["initial"])}, lambda: now
  )
  pl.when(fresh)(lambda: plan.store(out["carry"]["start"], now["theta"]))
  return now


def _start(x, g, marks, theta, plan: Plan):
  """Weights that steps are added to, and the batch's first as operands."""
  dtype = x["blocks"]["k"].dtype
  operands = lambda weights: {
    name: w.astype(dtype) if name in plan.network.maps else w
    for name, w in weights.items()
  }
  if "start" not in x["carry"]:
    return theta, operands(theta)
  first = lambda: plan.weights(x["carry"]["start"])
  goes_on = (g == 0) & (marks & FRESH == 0)
  start = jax.lax.cond(
    goes_on, lambda: operands(first()), lambda: operands(theta)
  )
  if not plan.network.restarts:
    return theta, start
  # What has no tokens writes nothing.
  counts = goes_on & (marks & USED != 0)
  return jax.lax.cond(counts, first, lambda: theta), start


def _coefficients(blocks, g, plan: Plan) -> dict[str, Any]:
  """Those of a batch that there are; others are None."""
  sides = {
    "write": (plan.rows, plan.columns),
    "decay": (plan.rows,),
    "carry": (plan.rows,),
    "last": (plan.columns,),
    "momentum_write": (plan.columns,),
    **dict.fromkeys(("end_decay", "end_carry", "momentum_decay"), ()),
  }
  return {
    name: load(blocks[name], g, *spans) if name in blocks else None
    for name, spans in sides.items()
  }


def _keys(static, weights, k, v, plan: Plan) -> Keys:
  """Passes keys through the network at weights that are operands, and back."""
  dtype = k.dtype
  zeros = {
    name: jnp.zeros((plan.columns.size, whole(width).size), jnp.float32)
    for name, (_, width) in plan.network.maps.items()
  }

  def predict(shift, k):
    inputs = {}

    def affine(name, x):
      inputs[name] = x.astype(dtype)
      out = _product(plan.interpret, x, weights[name])
      return _add_bias(out + shift[name], weights, name)

    return plan.network.forward(affine, static, k), inputs

  # Of keys, too, which nobody uses: no rule of `_product` is left over.
  output, pull, inputs = jax.vjp(
    predict, zeros, k.astype(jnp.float32), has_aux=True
  )
  loss_gradient = plan.network.loss_gradient(output, v.astype(jnp.float32))
  descent, _ = pull(-loss_gradient)
  return Keys(inputs, descent)


def _multiply(interpret, x, weight):
  return dot(x.astype(weight.dtype), weight, (1, 0), interpret)


_product = jax.custom_vjp(_multiply, nondiff_argnums=(0,))
# Derivatives are operands of the weights' dtype, too.
_product.defvjp(
  lambda interpret, x, weight: (_multiply(interpret, x, weight), weight),
  lambda interpret, weight, d: (
    dot(d.astype(weight.dtype), weight, (1, 1), interpret),
    None,
  ),
)


def _read(base, momentum, coefficients, keys: Keys, plan: Plan, name, z):
  """One map at every row's own weights; see the op's `_pieces`."""
  inputs, descent = keys.inputs[name], keys.descent[name]
  dtype = inputs.dtype
  z = z.astype(dtype)
  rows = lambda kind, x: x * coefficients[kind][:, None]
  through = lambda weights: _add_bias(
    plan.dot(z, weights[name].astype(dtype), 1, 0), weights, name
  )
  out = through(base)
  if coefficients["decay"] is not None:
    out = rows("decay", out)
  if momentum is not None:
    out += rows("carry", through(momentum))
  scores = plan.dot(z, inputs, 1, 1)
  if bias_name(name) in base:  # its input is 1
    scores += 1.0
  scores *= coefficients["write"]
  return out + plan.dot(scores.astype(dtype), descent.astype(dtype), 1, 0)


def _add_bias(out, weights, name):
  bias = weights.get(bias_name(name))
  return out if bias is None else out + bias[None]


def _after(base, momentum, coefficients, keys: Keys, plan: Plan):
  """Weights and momentum after a batch."""
  kept = [(coefficients["end_decay"], base)]
  if momentum is None:
    return {"theta": _sum(kept, coefficients["last"], keys, plan)}
  kept.append((coefficients["end_carry"], momentum))
  before = [(coefficients["momentum_decay"], momentum)]
  return {
    "theta": _sum(kept, coefficients["last"], keys, plan),
    "momentum": _sum(before, coefficients["momentum_write"], keys, plan),
  }


def _sum(kept, weight, keys: Keys, plan: Plan) -> Arrays:
  """Of what is kept, each times its factor, and of weighted gradients."""

  def before(name):
    terms = [x[name] if f is None else f * x[name] for f, x in kept]
    return functools.reduce(jnp.add, terms)

  new = {}
  for name, inputs in keys.inputs.items():
    steps = weight[:, None] * keys.descent[name]
    written = plan.dot(inputs, steps.astype(inputs.dtype), 0, 0)
    new[name] = before(name) + written
    if bias_name(name) in kept[0][1]:
      new[bias_name(name)] = before(bias_name(name)) + jnp.sum(steps, 0)
  return new
