"""`Cell` against flax's cells, one by one, and under every aggregator."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.caching import (
  Cached,
  Constant,
  GatedResidual,
  MemorySoup,
  Residual,
  SparseSelective,
)
from memcache_jax.memories import Cell, HeadShape
from memcache_jax.testing import assert_close, random_tokens
from tests.layers.cases import fast_to_compile

SHAPE = HeadShape(num_heads=2, key_dim=4, value_dim=3)
ROWS, LENGTH, SEGMENT = 2, 11, 4
WRITE_MODES = ("independent", "checkpoint")


class Leaky(nnx.RNNCellBase):
  """A user's cell: another carry than output, and not zero at first."""

  def __init__(self, in_features, hidden_features, *, rngs):
    self.inner = nnx.Linear(in_features, hidden_features, rngs=rngs)

  def initialize_carry(self, input_shape, rngs=None, carry_init=None):
    shape = (*input_shape[:-1], self.inner.out_features)
    return {"leak": jax.random.normal(rngs.carry(), shape)}

  def __call__(self, carry, inputs):
    leak = 0.9 * carry["leak"] + self.inner(inputs)
    return {"leak": leak}, jnp.tanh(leak)


def _of_head(tree, head):
  return jax.tree.map(lambda x: x[head], tree)


def _outputs(memory, params, tokens, segment):
  """What the cells give [b t n v], from flax modules in a Python loop."""
  heads = []
  for n in range(SHAPE.num_heads):
    cell = memory.cell(7, 3, rngs=nnx.Rngs(5))
    nnx.update(cell, _of_head(params["cell"], n))
    first = _of_head(params["carry"], n)
    first = jax.tree.map(lambda x: jnp.stack([x] * ROWS), first)
    carry, outputs = first, []
    for t in range(LENGTH):
      if t % segment == 0:
        carry = first
      inputs = jnp.concatenate([tokens.k[:, t, n], tokens.v[:, t, n]], -1)
      carry, output = cell(carry, inputs)
      outputs.append(output)
    heads.append(jnp.stack(outputs, axis=1))
  return jnp.stack(heads, axis=2)


def _opening(params, tokens):
  logits = np.einsum("btnk,nkv->btnv", tokens.q, params["w"])
  return 1 / (1 + np.exp(-logits))


def _tokens(memory):
  tokens = random_tokens(memory, SHAPE, ROWS, LENGTH)
  return replace(tokens, mask=None, starts=None)


@pytest.mark.parametrize(
  "cell",
  [nnx.GRUCell, nnx.OptimizedLSTMCell, nnx.SimpleCell, Leaky],
)
def test_is_the_cell_of_flax(cell):
  memory = Cell(cell)
  params = memory.init_params(jax.random.key(1), SHAPE)
  tokens = _tokens(memory)
  y, state = fast_to_compile(memory.scan)(params, None, tokens)
  outputs = _outputs(memory, params, tokens, LENGTH)
  assert_close(y, outputs * _opening(params, tokens), 1e-5)
  # What is cached is no more than what is read.
  chex.assert_trees_all_close(memory.snapshot(state), outputs[:, -1], atol=1e-5)


def test_every_aggregator_and_write_mode():
  memory = Cell(Leaky)
  params = memory.init_params(jax.random.key(1), SHAPE)
  ways = [
    Cached(memory, Constant(SEGMENT), aggregate, mode)
    for aggregate in (
      Residual(),
      GatedResidual(),
      MemorySoup(),
      SparseSelective(1),
    )
    for mode in WRITE_MODES
  ]
  tokens = _tokens(ways[2])
  bare = replace(tokens, gates={})

  @fast_to_compile
  def run(tokens):
    return [
      way.inspect(
        params, None, tokens if way.gates() else replace(tokens, gates={})
      )
      for way in ways
    ]

  opening = _opening(params, bare)
  for way, (y, _, weights) in zip(ways, run(tokens), strict=True):
    independent = way.write_mode == "independent"
    own = _outputs(memory, params, bare, SEGMENT if independent else LENGTH)
    stored = own[:, SEGMENT - 1 :: SEGMENT]
    mixed = jnp.einsum("btns,bsnv->btnv", weights[..., :-1], stored)
    mixed += weights[..., -1:] * own
    assert_close(y, mixed * opening, 1e-5)


def test_every_parameter_is_learned():
  memory = Cached(Cell(nnx.SimpleCell), Constant(SEGMENT), Residual())
  params = memory.init_params(jax.random.key(1), SHAPE)
  tokens = _tokens(memory)

  @fast_to_compile
  @jax.grad
  def gradient(params):
    return jnp.sum(jnp.sin(memory.scan(params, None, tokens)[0]))

  found = gradient(params)
  chex.assert_tree_all_finite(found)
  assert len(jax.tree.leaves(found)) == 5
  assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(found))


class Dropping(nnx.GRUCell):
  def __init__(self, in_features, hidden_features, *, rngs):
    super().__init__(in_features, hidden_features, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Counting(Leaky):
  def initialize_carry(self, input_shape, rngs=None, carry_init=None):
    return jnp.zeros((), jnp.int32)

  def __call__(self, carry, inputs):
    return carry + 1, self.inner(inputs)


def _of_width_four(in_features, hidden_features, *, rngs):
  del hidden_features
  return nnx.GRUCell(in_features, 4, rngs=rngs)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
  ("cell", "message"),
  [
    (None, "`cell` must make a cell .*: got None"),
    (nnx.Linear, "must make an nnx.RNNCellBase: got a Linear"),
    (Dropping, r"only nnx.Param: got dropout.rngs.*"),
    (Counting, "floating carry: got int32"),
    (_of_width_four, r"output of width 3.*: got shape \(4,\)"),
  ],
)
def test_wrong_cells(cell, message):
  with pytest.raises(ValueError, match=message):
    Cell(cell).init_params(jax.random.key(0), SHAPE)


def test_a_cell_that_is_made_already():
  with pytest.raises(ValueError, match="got an instance of GRUCell"):
    Cell(nnx.GRUCell(7, 3, rngs=nnx.Rngs(0)))
