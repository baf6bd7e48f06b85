"""Reads of a few selected networks per token, on a GPU, and their gradients.

Pairs of a token and a network have places in tiles, as those of matrices have
(`cache_read/triton_selected.py`): a program sends the tokens of one tile
through its network, as reads of all networks send a block of tokens. Gradients
of a network are sums over its tiles, for some columns of the hidden layer.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..cache_read.triton_selected import (
  Tiles,
  for_used_tile,
  tokens_and_pairs,
)
from ..linear_attention.operands import like
from ..linear_attention.tiles import load, store, whole
from .config import TritonConfig
from .network import Arrays
from .triton import (
  Network,
  Plan,
  after_last,
  block_of,
  blocks,
  last_map,
  tokens_at,
)
from .triton_vjp import Kept, add_tokens, pull, store_sums, zeros


def fwd(
  network: Network,
  q: jax.Array,
  networks: Arrays,
  static: Arrays,
  weights: jax.Array,
  tiles: Tiles,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> jax.Array:
  """Gated reads of all pairs.

  Args:
    network: what is read.
    q: queries [b t n k].
    networks: weights of each map, by its name [b s n i o] float32, and its
      bias, if it has one [b s n o] float32.
    static: parameters that all networks share [b 1 n v] float32.
    weights: gates of pairs [b (t r) n] float32.
    tiles: see there; of as many places as `config.rows`.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    [b (t r) n v] float32; anything at pairs without a place.
  """
  b, pairs, n = weights.shape
  plan = Plan(network, config, interpret)
  arrays = {"q": q, "networks": networks, "static": static, "weights": weights}
  return plan.call(
    _read_kernel,
    "read_selected_networks_read",
    (tiles.state.shape[1], 1, n, b),
    arrays | tiles._asdict(),
    {"reads": like(q, b, pairs, n, network.widths[2])},
  )["reads"]


def bwd(
  network: Network,
  q: jax.Array,
  networks: Arrays,
  static: Arrays,
  weights: jax.Array,
  tiles: Tiles,
  d_y: jax.Array,
  *,
  config: TritonConfig,
  interpret: bool = False,
) -> tuple[jax.Array, Arrays, Arrays, jax.Array]:
  """Gradients of queries, networks, static parameters and gates.

  Args:
    network: as in the forward pass.
    q: as in the forward pass.
    networks: as in the forward pass.
    static: as in the forward pass.
    weights: as in the forward pass.
    tiles: as in the forward pass.
    d_y: gradient of the sums of all reads of a token [b t n v], in the dtype
      of q.
    config: the pieces.
    interpret: run without a GPU.

  Returns:
    Float32: what pairs add to those of queries [b (t r) n k], anything at
    pairs without a place; those of networks and of static parameters; those of
    gates [b (t r) n], likewise.
  """
  (b, pairs, n), count = weights.shape, tiles.state.shape[1]
  plan = Plan(network, config, interpret)
  arrays = {"q": q, "networks": networks, "static": static, "weights": weights}
  arrays |= tiles._asdict()
  d = plan.call(
    _read_vjp_kernel,
    "read_selected_networks_read_vjp",
    (count, 1, n, b),
    {**arrays, "d_y": d_y},
    {
      "q": like(q, b, pairs, n, q.shape[3]),
      "weights": like(q, *weights.shape),
      "last": like(q, b, pairs, n, network.widths[2], dtype=q.dtype),
      "parts": {name: like(q, count, *x.shape) for name, x in static.items()},
    },
  )
  slots = jax.tree.leaves(networks)[0].shape[1]
  d_networks = plan.call(
    _networks_vjp_kernel,
    "read_selected_networks_networks_vjp",
    (blocks(plan), slots, n, b),
    {**arrays, "last": d["last"]},
    {"networks": {name: like(q, *x.shape) for name, x in networks.items()}},
  )["networks"]
  pair = tiles.pair.reshape(b, count, -1, n)
  used = jnp.moveaxis(pair[:, :, :1] >= 0, 1, 0)[..., None]
  d_static = {
    name: jnp.sum(jnp.where(used, x, 0.0), 0) for name, x in d["parts"].items()
  }
  return d["q"], d_networks, d_static, d["weights"]


def _read_kernel(x, out, *, plan: Plan):
  tile, columns = pl.program_id(0), whole(plan.network.widths[2])

  def read(rows, pairs):
    tokens = tokens_at(x, rows, plan)
    last = last_map(x, load(x["state"], tile), tokens, plan)
    gate = load(x["weights"], pairs)[:, None]
    store(out["reads"], gate * after_last(last, tokens, plan), pairs, columns)

  for_used_tile(read, x, tile, plan.config.rows)


def _read_vjp_kernel(x, out, *, plan: Plan):
  tile, (key, _, value) = pl.program_id(0), plan.network.widths
  inner, columns = whole(key), whole(value)

  def read(rows, pairs):
    tokens = tokens_at(x, rows, plan)
    gate = load(x["weights"], pairs)[:, None]
    d_y = load(x["d_y"], rows, columns).astype(jnp.float32)
    d_q = jnp.zeros((rows.size, inner.size), jnp.float32)
    last = Kept(out["last"], (pairs,))
    d = pull(x, load(x["state"], tile), tokens, gate, d_y, d_q, last, plan)
    store(out["q"], d.queries, pairs, inner)
    store(out["weights"], d.gates, pairs)
    for name, part in d.static.items():
      store(out["parts"][name], jnp.sum(part, 0), 0, columns)

  for_used_tile(read, x, tile, plan.config.rows)


def _networks_vjp_kernel(x, out, *, plan: Plan):
  block, slot = block_of(pl.program_id(0), plan), pl.program_id(1)

  def step(tile, sums):
    rows, pairs = tokens_and_pairs(x, tile, plan.config.rows)
    d_last = Kept(x["last"], (pairs,))
    return add_tokens(x, slot, rows, d_last, sums, block, plan)

  first, end = (load(x["first"], slot + i) for i in range(2))
  sums = jax.lax.fori_loop(first, end, step, zeros(x, block, plan))
  store_sums(x, out, sums, slot, block, plan)
