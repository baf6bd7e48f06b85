"""Between reads of selected states and their kernels: pairs in tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from memcache_jax.array_typing import Array, Float, Int, PyTree
from memcache_jax.ops import _dispatch
from memcache_jax.ops.cache_read._plan import make_plan


def why_not(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
) -> str | None:
  """Why the kernels cannot take a call; None if they can."""
  if (reason := _dispatch.why_not_installed()) is not None:
    return reason
  module = _dispatch.kernel_module("cache_read.config")
  return module.selected_supports(
    call(q, index, states.shape[1], states.shape[4])
  )


def mosaic_tpu(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
) -> Float[Array, "b t n v"]:
  """`selected_read`, as a kernel for TPUs."""
  sizes = call(q, index, states.shape[1], states.shape[4])
  return forward(_reader(states, q), sizes, q, states, {}, index, weights)


def mosaic_tpu_vjp(
  q: Float[Array, "b t n k"],
  states: Float[Array, "b s n k v"],
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  d_y: Float[Array, "b t n v"],
) -> tuple[
  Float[Array, "b t n k"],
  Float[Array, "b s n k v"],
  Float[Array, "b t n r"],
]:
  """Its gradients."""
  sizes = call(q, index, states.shape[1], states.shape[4])
  d_q, d_states, _, d_weights = gradients(
    _reader(states, q), sizes, q, states, {}, index, weights, d_y
  )
  return d_q, d_states, d_weights


def _reader(states, q):
  module = _dispatch.kernel_module("cache_read.selected")
  return module.matrices(*states.shape[-2:], q.dtype)


def call(
  q: Float[Array, "b t n k"],
  index: Int[Array, "b t n r"],
  slots: int,
  value_dim: int,
  maps: tuple[tuple[int, int], ...] = (),
) -> Any:
  """The kernels' `SelectedCall`."""
  b, t, n, k = q.shape
  return _dispatch.kernel_module("cache_read.config").SelectedCall(
    *(k, value_dim, q.dtype.name),
    tokens=t,
    states=slots,
    selected=index.shape[3],
    heads=b * n,
    maps=maps,
  )


def forward(
  reader: Any,
  sizes: Any,
  q: Float[Array, "b t n k"],
  stored: PyTree,
  shared: PyTree,
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
) -> Float[Array, "b t n v"]:
  """Gated reads of what tokens selected.

  Args:
    reader: the kernels' `Reader`.
    sizes: their `SelectedCall`.
    q: queries.
    stored: arrays of the states [b s n x y].
    shared: arrays that all states share [b n 1 x].
    index: states that tokens selected; -1 for none.
    weights: the gate of each.
  """
  config = _config(sizes)
  tiles, _ = _tiles(sizes, config, index, weights)
  y = _dispatch.kernel_module("cache_read.selected").fwd(
    *(reader, _words(config, q), stored, shared, tiles), config=config
  )
  return _tokens(y, q)


def gradients(
  reader: Any,
  sizes: Any,
  q: Float[Array, "b t n k"],
  stored: PyTree,
  shared: PyTree,
  index: Int[Array, "b t n r"],
  weights: Float[Array, "b t n r"],
  d_y: Float[Array, "b t n v"],
) -> tuple[Float[Array, "b t n k"], PyTree, PyTree, Float[Array, "b t n r"]]:
  """Those of `forward`, of q, stored, shared and weights."""
  config = _config(sizes)
  tiles, place = _tiles(sizes, config, index, weights)
  words = _words(config, q, d_y.astype(q.dtype))
  d_q, *d_states, d_places = _dispatch.kernel_module(
    "cache_read.selected_vjp"
  ).bwd(reader, words, stored, shared, tiles, config=config)
  # Sums over blocks of tokens.
  d_stored, d_shared = jax.tree.map(
    lambda x: jnp.sum(x.reshape(q.shape[0], -1, *x.shape[1:]), axis=1), d_states
  )
  d_places = rearrange(
    d_places[..., : tiles.rows.shape[2]], "b n c p -> b n (p c)"
  )
  d_weights = _numbers(d_places, place)
  d_weights = rearrange(d_weights, "b n (t r) -> b n t r", r=index.shape[3])
  d_weights = _tokens(d_weights, q).astype(weights.dtype)
  as_given = functools.partial(jax.tree.map, lambda x, d: d.astype(x.dtype))
  return (
    *(_tokens(d_q, q), as_given(stored, d_stored)),
    *(as_given(shared, d_shared), d_weights),
  )


def _config(sizes) -> Any:
  return _dispatch.kernel_module("cache_read.config").selected_config(sizes)


def _words(config, *rows):
  """Rows [b t n x] of tokens in words [b n t lanes], by blocks of tokens."""
  encode = _dispatch.kernel_module("cache_read.selected_rows").encode
  return encode(*(_blocks(x, config.tokens) for x in rows))


def _tiles(sizes, config, index, weights):
  """The kernels' `Tiles`, and the place [b n (t r)] of each pair."""
  pieces = _dispatch.kernel_module("cache_read.config")
  fill = lambda x: jnp.pad(
    x,
    [(0, 0), (0, -x.shape[1] % config.tokens), (0, 0), (0, 0)],
    constant_values=-1,
  )
  split = lambda x: rearrange(
    fill(x), "b (g t) ... -> (b g) t ...", t=config.tokens
  )
  index, weights = split(index), split(weights.astype(jnp.float32))
  plan = make_plan(index, sizes.states, config.tile)
  count = pieces.tiles(sizes, config)
  pair = rearrange(plan.pair, "b n (p c) -> b n p c", c=config.tile)
  rows = jnp.sum(pair >= 0, axis=3, dtype=jnp.int32)
  state = rearrange(plan.memory, "b p n -> b n p")
  last = jnp.max(jnp.where(rows > 0, state, 0), axis=2, keepdims=True)
  state = _fill(jnp.where(rows > 0, state, last), count + config.ring, "edge")
  weights = rearrange(weights, "b t n r -> b n (t r)")
  weights = rearrange(
    _numbers(weights, plan.pair), "b n (p c) -> b n c p", c=config.tile
  )
  place = jnp.where(plan.place < 0, count * config.tile, plan.place)
  pairs, columns = pieces.table_shape(config)
  place = rearrange(place, "b n (g j) -> b n j g", j=pairs)
  module = _dispatch.kernel_module("cache_read.selected")
  tiles = module.Tiles(
    state=state,
    used=jnp.sum(rows > 0, axis=2, dtype=jnp.int32),
    rows=_fill(rows, count),
    place=_fill(place, columns),
    weights=_fill(weights, pieces.lanes(count)),
  )
  return tiles, plan.place


def _fill(x, size, mode="constant"):
  width = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
  return jnp.pad(x, width, mode=mode)


def _numbers(x, index):
  """x [b n m], index [b n j] -> [b n j]; zeros where it is -1."""
  take = jax.vmap(jax.vmap(lambda x, i: x[jnp.maximum(i, 0)]))
  return jnp.where(index >= 0, take(x, index), 0.0)


def _blocks(x, tokens):
  x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % tokens), (0, 0), (0, 0)])
  return rearrange(x, "b (g t) n k -> (b g) n t k", t=tokens)


def _tokens(x, like):
  """[(b g) n t k] -> [b t n k], without what filled up the last block."""
  x = rearrange(x, "(b g) n t k -> b (g t) n k", b=like.shape[0])
  return x[:, : like.shape[1]]
