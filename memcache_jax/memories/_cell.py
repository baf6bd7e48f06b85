"""`Cell`: any recurrent cell of flax as a memory that is one vector."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcache_jax.array_typing import (
  Array,
  Float,
  Gates,
  Params,
  PRNGKeyArray,
  State,
)
from memcache_jax.memories._base import HeadShape, Memory


class CellState(NamedTuple):
  """State of a `Cell` memory.

  Attributes:
    carry: of the cell, leaves [b n ...].
    output: what the cell gave for the last token; all that is cached.
  """

  carry: State
  output: Float[Array, "b n v"]


@dataclass(frozen=True)
class Cell(Memory):
  r"""A recurrent cell (GRU, LSTM, ...) whose output is a vector memory.

  .. math::
    c_t, h_t &= \mathrm{cell}(c_{t-1}, [k_t; v_t]) \\
    y_t &= h_t \odot \sigma(q_t W)

  Memory Caching (arXiv 2602.24281) caches any recurrent network. A vector has
  no matrix product with a query, so it is read as in its Eq. 20, by an
  element-wise product. Every head has a cell of its own, of width v, and a W of
  shape [k v], which lets queries be narrower than values. A read needs h alone:
  that is what is cached, without the c of an LSTM. Reading is linear in h, so
  that a soup of cells is a gated residual.

  The carry before the first token is a parameter, which starts as
  `initialize_carry` says. Tokens are written one after another: a cell that
  depends on its own output has no parallel form.

  In a `MemoryMixer` the weights of the cell are parameters of a memory, and as
  such free of weight decay.

  Attributes:
    cell: makes a cell, as `cell(in_features, features, rngs=rngs)`: a class
      such as `nnx.GRUCell`, or a function of a module for one with options.
      It must be hashable, and the cell must hold nothing but `nnx.Param`, and
      treat leading axes as rows.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from memcache_jax.caching import Cached, Constant
    >>> from memcache_jax.layers import MemoryMixer
    >>> from memcache_jax.memories import Cell
    >>> memory = Cached(Cell(nnx.LSTMCell), Constant(8))
    >>> mixer = MemoryMixer(16, 2, memory, rngs=nnx.Rngs(0))
    >>> run = jax.jit(MemoryMixer.__call__)
    >>> y, state = run(mixer, jnp.ones((1, 20, 16)))
    >>> y.shape
    (1, 20, 16)
  """

  cell: Callable[..., nnx.RNNCellBase]

  reads_linearly: ClassVar[bool] = True

  def __post_init__(self):
    if not callable(self.cell) or isinstance(self.cell, nnx.Module):
      raise ValueError(
        "`cell` must make a cell when called, such as the class nnx.GRUCell: "
        f"got {_describe(self.cell)}."
      )

  def init_params(self, key: PRNGKeyArray, shape: HeadShape) -> Params:
    """Cell, carry before the first token, and what queries are read with.

    Raises:
      ValueError: when the cell is not one this memory can hold.
    """
    _check_cell(self.cell, shape)

    def head(key):
      rngs = nnx.Rngs(key)
      cell = _make(self.cell, shape, rngs)
      carry = cell.initialize_carry((_width(shape),), rngs=rngs)
      w = jax.random.normal(
        rngs.params(), (shape.key_dim, shape.value_dim), jnp.float32
      )
      weights = nnx.to_pure_dict(nnx.state(cell, nnx.Param))
      return {"cell": weights, "carry": carry, "w": w}

    return _float32(jax.vmap(head)(jax.random.split(key, shape.num_heads)))

  def init_state(
    self,
    params: Params,
    shape: HeadShape,
    batch: int,
    *,
    max_length: int | None = None,
  ) -> CellState:
    del max_length
    n, _, v = shape
    carry = jax.tree.map(
      lambda x: jnp.repeat(x[None], batch, axis=0), _float32(params["carry"])
    )
    return CellState(carry, jnp.zeros((batch, n, v), jnp.float32))

  def step(
    self,
    params: Params,
    state: State,
    k: Float[Array, "b n k"],
    v: Float[Array, "b n v"],
    gates: Gates,
  ) -> CellState:
    del gates
    shape = HeadShape(k.shape[1], k.shape[2], v.shape[2])
    inputs = jnp.concatenate([k, v], axis=-1).astype(jnp.float32)

    def head(weights, carry, inputs):
      return _merge(self.cell, shape, weights)(carry, inputs)

    heads = jax.vmap(head, in_axes=(0, 1, 1), out_axes=1)
    carry, output = heads(params["cell"], state.carry, inputs)
    return CellState(_float32(carry), output.astype(jnp.float32))

  def snapshot(self, state: State) -> Float[Array, "b n v"]:
    return state.output

  def read(
    self, params: Params, memory: State, q: Float[Array, "b t n k"]
  ) -> Float[Array, "b t n v"]:
    return memory[:, None] * _opening(params, q)

  def read_many(
    self,
    params: Params,
    memories: State,
    q: Float[Array, "b t n k"],
    weights: Float[Array, "b t n s"],
  ) -> Float[Array, "b t n v"]:
    """Mixes the vectors, and reads the mix; see `Memory.read_many`."""
    mixed = jnp.einsum(
      "btns,bsnv->btnv", weights, memories, precision="highest"
    )
    return mixed * _opening(params, q)


def _describe(cell) -> str:
  if isinstance(cell, nnx.Module):  # its repr would fill a page
    return f"an instance of {type(cell).__name__}"
  return repr(cell)


def _opening(params, q):
  """How far each number of a memory is open to a query."""
  logits = jnp.einsum(
    "btnk,nkv->btnv",
    q.astype(jnp.float32),
    params["w"].astype(jnp.float32),
    precision="highest",
  )
  return jax.nn.sigmoid(logits)


def _width(shape: HeadShape) -> int:
  return shape.key_dim + shape.value_dim


def _make(cell, shape: HeadShape, rngs: nnx.Rngs) -> nnx.RNNCellBase:
  return cell(_width(shape), shape.value_dim, rngs=rngs)


def _merge(cell, shape: HeadShape, weights: Params) -> nnx.RNNCellBase:
  """The cell of one head, with these weights."""
  # Its structure is made anew, without arrays, whenever a program is traced:
  # the memory then holds nothing that equal memories might not share.
  graphdef, state = nnx.split(
    nnx.eval_shape(lambda: _make(cell, shape, nnx.Rngs(0)))
  )
  nnx.replace_by_pure_dict(state, weights)
  return nnx.merge(graphdef, state)


def _float32(tree):
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _check_cell(make, shape: HeadShape) -> None:
  """Raises ValueError for a cell that a memory cannot hold."""

  def call():
    rngs = nnx.Rngs(0)
    cell = _make(make, shape, rngs)
    if not isinstance(cell, nnx.RNNCellBase):
      raise ValueError(
        "`cell` must make an nnx.RNNCellBase: got a "
        f"{type(cell).__name__} from {_describe(make)}."
      )
    carry = cell.initialize_carry((_width(shape),), rngs=rngs)
    return nnx.state(cell), carry, cell(carry, jnp.zeros((_width(shape),)))

  state, carry, (after, output) = nnx.eval_shape(call)
  others = nnx.to_flat_state(nnx.filter_state(state, nnx.Not(nnx.Param)))
  if others:
    raise ValueError(
      "`cell` must make cells that hold only nnx.Param: got "
      + ", ".join(".".join(map(str, path)) for path, _ in others)
      + "."
    )
  if output.shape != (shape.value_dim,):
    raise ValueError(
      f"`cell` must make cells with an output of width {shape.value_dim}, the "
      f"features they are made with: got shape {output.shape}."
    )
  for leaf in jax.tree.leaves(carry):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
        f"`cell` must make cells with a floating carry: got {leaf.dtype}."
      )
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  if shapes(after) != shapes(carry):
    raise ValueError(
      "`cell` must make cells whose carry keeps its shapes: "
      f"got {shapes(carry)} before and {shapes(after)} after a token."
    )
