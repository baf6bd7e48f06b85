"""Inner batches of a network that is trained as it reads, on a GPU.

A program takes all inner batches of one head, whose weights and momentum lie in
main memory meanwhile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..linear_attention.operands import like
from ..linear_attention.tiles import call, load, store, whole
from . import triton
from .batches import FRESH, Arrays
from .config import TritonConfig
from .triton_batch import Memory, Plan, batch_of, run


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
      [b 1 n i o] and biases [b 1 n o], float32.
  """

  tokens: Arrays
  marks: jax.Array
  coefficients: Arrays
  static: Arrays
  initial: Arrays
  carry: dict[str, Arrays]


def fwd(
  memory: Memory,
  operands: Operands,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> tuple[jax.Array, dict[str, Arrays]]:
  """Reads of all tokens, and what is carried on.

  Args:
    memory: what is trained.
    operands: see there.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    y [g b n r v] float32, and `Operands.carry` after the last batch.
  """
  q, v = operands.tokens["q"], operands.tokens["v"]
  g, b, n, r, _ = q.shape
  plan = Plan(
    memory,
    triton.Plan(memory.network, config, interpret),
    rows=whole(r),
    columns=whole(v.shape[3]),
    batches=g,
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
  now = out["carry"]

  def step(g, nothing):
    # Other threads load what was stored, or store to the same places.
    plan.wait()
    marks = load(x["blocks"]["marks"], g)
    if x["initial"]:
      pl.when(marks & FRESH != 0)(lambda: _begin(x["initial"], now, plan))
    y = run(batch_of(x, now, g, marks, plan))
    store(out["blocks"]["y"], y, g, plan.rows, plan.value)
    return nothing

  for kind, weights in x["carry"].items():
    _fill(now[kind], functools.partial(_from, weights), plan)
  jax.lax.fori_loop(0, plan.batches, step, 0)


def _begin(initial, now, plan: Plan) -> None:
  """A document begins with weights of its own."""
  for kind, weights in now.items():
    new = _zeros if kind == "momentum" else functools.partial(_from, initial)
    _fill(weights, new, plan)
  plan.wait()


def _fill(weights, new, plan: Plan) -> None:
  def block(j, nothing):
    here = triton.block_of(j, plan.reading)
    for name, sides in triton.sides_of(weights, here, plan.reading).items():
      store(weights[name], new(name, *sides), 0, *sides)
    return nothing

  jax.lax.fori_loop(0, triton.blocks(plan.reading), block, 0)


def _from(weights, name, *sides):
  return load(weights[name], 0, *sides)


def _zeros(_, *sides):
  return jnp.zeros([side.size for side in sides], jnp.float32)
