"""Helpers to test a memory: inputs, streams and a comparison that is fair."""

from collections.abc import Iterable
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np

from memcache_jax.array_typing import (
  Array,
  DType,
  Float,
  Params,
  PyTree,
  State,
)
from memcache_jax.memories._base import Gate, HeadShape, Memory, Tokens


def relative_error(
  x: Float[Array | np.ndarray, "*axes"],
  reference: Float[Array | np.ndarray, "*axes"],
) -> float:
  """``rms(x - reference) / max(rms(reference), 1e-3)``."""
  chex.assert_equal_shape((x, reference))
  x, reference = (np.asarray(a, np.float64) for a in (x, reference))
  if x.size == 0:
    return 0.0
  rms = lambda a: float(np.sqrt(np.mean(np.square(a))))
  return rms(x - reference) / max(rms(reference), 1e-3)


def assert_close(x: PyTree, reference: PyTree, tolerance: float = 2e-5) -> None:
  """Compares two pytrees leaf by leaf; floats by their relative error.

  Raises:
    AssertionError: when structure or shapes differ, something is not finite,
      or the relative error of a leaf is above the tolerance.
  """
  chex.assert_trees_all_equal_structs(x, reference)
  chex.assert_trees_all_equal_shapes(x, reference)
  chex.assert_tree_all_finite((x, reference))
  leaves = jax.tree_util.tree_leaves_with_path(x)
  for (path, a), b in zip(leaves, jax.tree.leaves(reference), strict=True):
    name = jax.tree_util.keystr(path)
    if not jnp.issubdtype(a.dtype, jnp.floating):
      np.testing.assert_array_equal(a, b, err_msg=name)
      continue
    error = relative_error(a, b)
    assert error <= tolerance, (
      f"{name or 'the array'} differs: relative error {error:.2e} is above "
      f"{tolerance:.0e}"
    )


def random_tokens(
  memory: Memory,
  shape: HeadShape,
  batch: int,
  length: int,
  *,
  seed: int = 0,
  mask_probability: float = 0.0,
  start_probability: float = 0.0,
  end_probability: float = 0.0,
  dtype: DType = jnp.float32,
) -> Tokens:
  """Random tokens with the gates the memory asks for.

  Args:
    memory: what the tokens are for.
    shape: sizes of the heads.
    batch: rows.
    length: tokens per row.
    seed: of NumPy's generator.
    mask_probability: share of tokens that do not exist.
    start_probability: share of tokens that start a document.
    end_probability: share of tokens that end a segment, for a memory with
      explicit segments.
    dtype: of q, k and v.

  Returns:
    Tokens with unit queries and keys. `mask` and `starts`, and what of
    `segment_ends` the memory uses, are always present, so that all tokens of
    one length run through one compiled function.
  """
  rng = np.random.default_rng(seed)
  n, k, v = shape
  normal = lambda *axes: rng.standard_normal((batch, length, n, *axes))
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  gates = {
    name: jnp.asarray(_random_gate(rng, gate, (batch, length, n), k))
    for name, gate in memory.gates().items()
  }
  flags = lambda probability: jnp.asarray(
    rng.random((batch, length)) < probability
  )
  return Tokens(
    q=jnp.asarray(unit(normal(k)), dtype),
    k=jnp.asarray(unit(normal(k)), dtype),
    v=jnp.asarray(normal(v), dtype),
    gates=gates,
    mask=~flags(mask_probability),
    starts=flags(start_probability),
    segment_ends=flags(end_probability) if memory.uses_segment_ends else None,
    max_unaligned_starts=length if start_probability else 0,
  )


def _random_gate(
  rng: np.random.Generator, gate: Gate, axes: tuple[int, ...], key_dim: int
) -> np.ndarray:
  axes = (*axes, *gate.axes(key_dim))
  match gate.kind:
    case "log_decay":
      x = -rng.exponential(0.2, axes)
    case "sigmoid":
      x = gate.scale * rng.random(axes)
    case "dt":
      x = rng.random(axes)
    case "direction":
      x = rng.standard_normal(axes)
      x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    case _:
      x = 2 * rng.standard_normal(axes)
  return x.astype(np.float32)


def take(tokens: Tokens, first: int, last: int) -> Tokens:
  """Tokens `first` up to but not including `last`."""
  return jax.tree.map(lambda x: x[:, first:last], tokens)


def stream(
  scan, state: State, tokens: Tokens, sizes: Iterable[int]
) -> tuple[Float[Array, "b t n v"], State]:
  """Runs tokens through a state in calls of the given sizes.

  Args:
    scan: `(state, tokens) -> (y, state)`, usually compiled.
    state: to start from.
    tokens: all of them.
    sizes: tokens per call; the last ones are repeated until all are used.
  """
  length, first, outputs = tokens.q.shape[1], 0, []
  # On the host no piece has to be compiled to be cut out, nor to be joined.
  tokens = jax.device_get(tokens)
  sizes = list(sizes)
  index = 0
  while first < length:
    size = min(sizes[min(index, len(sizes) - 1)], length - first)
    y, state = scan(state, take(tokens, first, first + size))
    outputs.append(y)
    first, index = first + size, index + 1
  return jnp.asarray(np.concatenate(outputs, axis=1)), state


def scan_one_by_one(
  memory: Memory, params: Params, state: State, tokens: Tokens
) -> tuple[Float[Array, "b t n v"], State]:
  """Calls `memory.scan` with one token at a time: the definition of many."""

  def advance(state, token):
    token = jax.tree.map(lambda x: x[:, None], token)
    y, state = memory.scan(params, state, token)
    return state, y[:, 0]

  token = replace(tokens, max_unaligned_starts=None)
  token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), token)
  state, y = jax.lax.scan(advance, state, token)
  return jnp.moveaxis(y, 0, 1), state
