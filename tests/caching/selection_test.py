"""How a selection is made and trained, against dense definitions."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.caching import (
  Cached,
  Constant,
  GumbelTopK,
  HardTopK,
  SparseSelective,
  StraightThrough,
  _ranks,
  _router,
  _weights,
)
from memcache_jax.memories import DecayedLinear, HeadShape, Linear, Titans
from memcache_jax.testing import assert_close, random_tokens, stream
from tests.layers.cases import fast_to_compile
from tests.memories.models import FLAT

SHAPE = HeadShape(2, 4, 3)
T, C, TOP_K = 24, 4, 2
SEGMENTS = T // C
ALL = StraightThrough(reads="all", temperature=0.7)
SELECTED = StraightThrough()


def _cached(selection=HardTopK(), memory=None, **options):  # noqa: B008
  aggregate = SparseSelective(TOP_K, selection=selection, **options)
  return Cached(memory or Linear(), Constant(C), aggregate)


def _tokens(cached, length=T, seeds=False, **options):
  tokens = random_tokens(cached, SHAPE, 2, length, **options)
  tokens = replace(tokens, max_unaligned_starts=length)
  if not options:
    tokens = replace(tokens, mask=None, starts=None)
  if not seeds:
    return tokens
  bits = jax.random.bits(jax.random.key(7), (2, length))
  return replace(tokens, seeds=bits)


def _definition(cached, params, tokens, scores_noise=0.0):
  """Every memory read by every token, one softmax, and what is selected."""
  selection, memory = cached.aggregate.selection, cached.memory
  gates = {name: tokens.gates[name] for name in memory.gates()}
  segments = [
    replace(
      tokens,
      **{name: getattr(tokens, name)[:, i * C : (i + 1) * C] for name in "qkv"},
      gates=jax.tree.map(lambda x, i=i: x[:, i * C : (i + 1) * C], gates),
      seeds=None,
    )
    for i in range(SEGMENTS)
  ]
  scanned = [memory.scan(params, None, x) for x in segments]
  reads = [
    memory.read(params, memory.snapshot(state), tokens.q)
    for _, state in scanned
  ]
  reads.append(jnp.concatenate([y for y, _ in scanned], axis=1))
  reads = jnp.stack(reads, axis=-2)  # [b t n s + 1 v]
  k = tokens.k.reshape(2, SEGMENTS, C, *tokens.k.shape[2:])
  count = np.arange(1, C + 1, dtype=np.float32)
  running = jnp.cumsum(k, axis=2) / count[None, None, :, None, None]
  u = tokens.gates["u"]
  own = jnp.sum(u * running.reshape(tokens.k.shape), axis=-1, keepdims=True)
  logits = jnp.einsum("btnk,bsnk->btns", u, jnp.mean(k, axis=2))
  readable = np.arange(T)[:, None] // C > np.arange(SEGMENTS)[None]
  readable = jnp.asarray(readable)[None, :, None]
  low = lambda x: jnp.where(readable, x, -1e30)
  scores = low(logits + scores_noise)
  order = jnp.argsort(-scores, axis=-1, stable=True)
  rank = jnp.argsort(order, axis=-1)
  few = jnp.concatenate([(rank < TOP_K) & readable, own == own], axis=-1)
  both = jnp.concatenate([low(logits), own], axis=-1)
  hard = jax.nn.softmax(jnp.where(few, both, -1e30), axis=-1)
  gates = hard
  if isinstance(selection, StraightThrough):
    soft = jnp.concatenate([scores, own], axis=-1) / selection.temperature
    soft = jax.nn.softmax(soft, axis=-1)
    if selection.reads == "selected":
      reads = jnp.where(few[..., None], reads, 0.0)
    gates = soft + jax.lax.stop_gradient(hard - soft)
  return jnp.sum(gates[..., None] * reads, axis=-2), few[..., :-1]


def _noise(seeds):
  def draw(seed, number):
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, number), (2,))

  numbers = jnp.arange(SEGMENTS)
  draw = jax.vmap(draw, (None, 0), 1)
  return jax.vmap(jax.vmap(lambda seed: draw(seed, numbers)))(seeds)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_the_largest_are_those_of_top_k(count):
  """With equals, nan and infinities, in order."""
  rng = np.random.default_rng(0)
  x = rng.integers(0, 4, (3, 5, 2, 9)).astype(np.float32)
  x[x == 3] = -np.inf
  x[0, 0] = -np.inf
  x[1, 1, :, [3, 5]] = np.nan
  x[2, 2, :, [4, 6]] = np.inf
  x = jnp.asarray(x)
  expected = jax.lax.top_k(x, count)[1]
  chex.assert_trees_all_equal(_ranks.largest(x, count), expected)


def test_relevance_has_one_gradient_on_all_platforms():
  """Of chosen memories only: by moving rows, or by products with zeros."""
  rng = np.random.default_rng(0)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  u, keys, g = normal(2, 9, 2, 4), normal(2, 5, 2, 4), normal(2, 9, 2, 3)
  index = rng.random((2, 9, 2, 5)).argsort(-1)[..., :3]
  index = jnp.asarray(np.where(rng.random(index.shape) < 0.2, -1, index))

  def chosen(u, keys):
    logits = jnp.einsum("btnk,bsnk->btns", u, keys)
    return jnp.where(index >= 0, _ranks.at(logits, index), 0.0)

  expected = jax.vjp(chosen, u, keys)[1](g)
  g = jnp.where(index >= 0, g, 0.0)
  by_rows = jax.vmap(_router._by_rows, 2, 2)
  for rule in (by_rows, _router._by_products):
    assert_close(rule(u, keys, index, g), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize(
  "cached",
  [
    _cached(),
    _cached(SELECTED),
    _cached(ALL),
    _cached(GumbelTopK(reads="all", temperature=0.5)),
    _cached(ALL, Titans(FLAT, inner_batch=4)),
  ],
  ids=["hard", "selected", "all", "gumbel", "titans"],
)
def test_values_and_gradients_of_the_definition(cached, sparse, monkeypatch):
  monkeypatch.setattr(_weights, "_SLOTS_PER_SELECTED", 1 if sparse else 99)
  tokens = _tokens(cached, seeds=cached.aggregate.draws)
  noise = _noise(tokens.seeds) if cached.aggregate.draws else 0.0
  params = cached.init_params(jax.random.key(0), SHAPE)
  out = np.random.default_rng(1).standard_normal(tokens.v.shape)
  out = jnp.asarray(out, jnp.float32)

  def gradient(run):
    def loss(params, q, k, v, u):
      gates = dict(tokens.gates) | {"u": u}
      y = run(params, replace(tokens, q=q, k=k, v=v, gates=gates))
      return jnp.sum(y * out), y

    arrays = (params, tokens.q, tokens.k, tokens.v, tokens.gates["u"])
    numbers = tuple(range(len(arrays)))
    grad = jax.grad(loss, argnums=numbers, has_aux=True)
    return fast_to_compile(grad)(*arrays)

  got = gradient(lambda params, x: cached.scan(params, None, x)[0])
  want = gradient(lambda params, x: _definition(cached, params, x, noise)[0])
  assert_close(got, want)


def test_only_noise_changes_what_is_read():
  ways = [_cached(x) for x in (HardTopK(), SELECTED, ALL, GumbelTopK())]
  tokens = _tokens(ways[-1], seeds=True)
  quiet = replace(tokens, seeds=None)

  @fast_to_compile
  def run(quiet, tokens):
    values = [way.scan({}, None, quiet)[0] for way in ways]
    return values, ways[-1].scan({}, None, tokens)[0]

  values, drawn = run(quiet, tokens)
  for value in values[1:]:
    chex.assert_trees_all_equal(value, values[0])
  assert_close(drawn[:, : 3 * C], values[0][:, : 3 * C])  # two: no choice
  different = jnp.any(jnp.abs(drawn - values[0]) > 1e-3, axis=(0, 2, 3))
  assert np.mean(different[3 * C :]) > 0.5


def test_memories_are_drawn_from_the_softmax():
  """First draws; where all are alike, each memory as often as any other."""
  length = 400
  aggregate = SparseSelective(1, selection=GumbelTopK())
  cached = Cached(Linear(), Constant(100), aggregate)
  tokens = _tokens(cached, length, seeds=True)
  # The relevance of memory i is the logarithm of i + 1.
  k = (
    jnp.zeros_like(tokens.k)
    .at[..., 0]
    .set(np.log(1.0 + np.arange(length) // 100)[None, :, None])
  )
  u = jnp.zeros_like(tokens.k).at[..., 0].set(1.0)
  tokens = replace(tokens, k=k, gates={"u": u})
  weights = jax.jit(lambda x: cached.inspect({}, None, x)[2])(tokens)
  share = np.mean(weights[:, 300:, :, :3] > 0, axis=(0, 1, 2))
  np.testing.assert_allclose(share, [1 / 6, 2 / 6, 3 / 6], atol=0.08)


BLOCKS = Cached(
  DecayedLinear(), Constant(5), SparseSelective(2, block=2), "checkpoint"
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "cached",
  [
    BLOCKS,
    replace(
      BLOCKS,
      aggregate=SparseSelective(1, block=3, selection=GumbelTopK(reads="all")),
    ),
  ],
  ids=["hard", "gumbel"],
)
def test_any_split_with_blocks_and_seeds(cached):
  tokens = _tokens(
    cached,
    34,
    seeds=True,
    mask_probability=0.2,
    start_probability=0.06,
  )
  empty = cached.init_state({}, SHAPE, 2, max_length=34)
  scan = fast_to_compile(lambda state, tokens: cached.scan({}, state, tokens))
  expected = scan(empty, tokens)
  assert_close(stream(scan, empty, tokens, [1]), expected)
  assert_close(stream(scan, empty, tokens, [6]), expected)
  fresh = fast_to_compile(lambda tokens: cached.scan({}, None, tokens)[0])
  assert_close(fresh(tokens), expected[0])


def test_a_block_reads_what_its_first_token_selects():
  block = 3  # does not divide the segment
  alone, shared = _cached(), _cached(block=block)
  tokens = _tokens(alone)

  @jax.jit
  def read(tokens):
    ways = [x.inspect({}, None, tokens) for x in (alone, shared)]
    return [weights[..., :-1] > 0 for _, _, weights in ways]

  by_token, by_block = read(tokens)
  position = np.arange(T) % C
  first = np.arange(T) - position % block
  np.testing.assert_array_equal(by_block, by_token[:, first])
  assert np.any(by_block != by_token)


def test_more_than_there_is_to_select():
  """All are read, and the softmax is the one that is differentiated."""
  tokens = _tokens(_cached())

  @fast_to_compile
  def gradients(u):
    def loss(u, selection):
      aggregate = SparseSelective(SEGMENTS + 1, selection=selection)
      cached = Cached(Linear(), Constant(C), aggregate)
      y = cached.scan({}, None, replace(tokens, gates={"u": u}))[0]
      return jnp.sum(jnp.sin(y))

    ways = (HardTopK(), StraightThrough(), StraightThrough(reads="all"))
    return [jax.grad(loss)(u, way) for way in ways]

  hard, *others = gradients(tokens.gates["u"])
  assert_close(others, [hard, hard])


def test_without_gates_the_router_learns_from_the_softmax():
  tokens = _tokens(_cached())

  @fast_to_compile
  def gradients(u):
    def loss(u, selection):
      cached = _cached(selection, gate="none")
      y = cached.scan({}, None, replace(tokens, gates={"u": u}))[0]
      return jnp.sum(jnp.sin(y))

    return [jax.grad(loss)(u, way) for way in (HardTopK(), SELECTED)]

  hard, soft = gradients(tokens.gates["u"])
  assert not np.any(hard)
  assert np.all(np.isfinite(soft))
  assert np.any(soft)


@pytest.mark.usefixtures("as_a_user")
def test_wrong_options():
  for options, match in (
    ({"selection": "hard"}, "`selection` must be HardTopK, StraightThrough"),
    ({"block": 0}, "`block` must be an int of at least 1: got 0"),
  ):
    with pytest.raises(ValueError, match=match):
      SparseSelective(2, **options)
  with pytest.raises(ValueError, match="`reads` must be one of"):
    StraightThrough(reads="none")
  with pytest.raises(ValueError, match="`temperature` must be a number above"):
    GumbelTopK(temperature=0.0)
  cached = _cached(GumbelTopK())
  tokens = _tokens(cached, seeds=True)
  for seeds, match in (
    (tokens.seeds[:, 1:], "`seeds` must have axes"),
    (jnp.zeros((2, T)), "`seeds` must be uint32: got float32"),
  ):
    with pytest.raises(ValueError, match=match):
      cached.scan({}, None, replace(tokens, seeds=seeds))
