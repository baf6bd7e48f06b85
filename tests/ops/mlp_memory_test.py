"""The MLP memory op: its two forms agree, and what else it promises.

Reference numbers (tests/caching/golden_test.py) and the properties of every
memory (tests/memories/contract_test.py) are tested through memories.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from memcache_jax.ops import mlp_memory as op
from memcache_jax.ops.mlp_memory._pieces import num_pieces
from memcache_jax.ops.mlp_memory._state import make_rule
from memcache_jax.testing import assert_close

# Many kinds, each compiled twice with its gradient.
pytestmark = pytest.mark.slow

B, T, N, K, SLOTS = 2, 9, 2, 4, 2
MOMENTUM = ("step", "log_decay", "momentum")

# What each kind of memory is made of, and the gates it takes. Between them:
# depths 1 to 4, with and without norm, bias and residual. (deep_test.py has a
# gated network.)
KINDS = {
  "titans": ({"architecture": op.MLP(hidden_factor=2)}, MOMENTUM),
  "dla": (
    {
      "architecture": op.MLP(
        depth=4, hidden_factor=1, bias=True, norm=False, activation="silu"
      ),
      "loss": op.Dot(),
    },
    ("step",),
  ),
  # The window is longer than an inner batch.
  "omega": (
    {"architecture": op.MLP(depth=1, residual=False), "inner_batch": 2},
    MOMENTUM,
  ),
  # Inner batches of two pieces.
  "pieces": (
    {"architecture": op.MLP(hidden_factor=2, bias=True), "inner_batch": 12},
    MOMENTUM,
  ),
  "rows": (
    {
      "architecture": op.MLP.ttt_linear(),
      "row_scale": 1 / jnp.arange(1.0, 4.0)[None] * jnp.ones((N, 1)),
    },
    ("step",),
  ),
  "yaad": (
    {
      "architecture": op.MLP(depth=3, hidden_factor=1, norm=False),
      "loss": op.Huber(),
    },
    ("step", "log_decay"),
  ),
  "moneta": (
    {
      "architecture": op.MLP(depth=1, bias=True, residual=False),
      "loss": op.Lp(),
      "closing": op.NormClosing(),
    },
    ("step", "log_decay"),
  ),
  "memora": (
    {"architecture": op.MLP(depth=1), "closing": op.EntropyClosing()},
    ("step", "log_decay"),
  ),
  "muon": (
    {
      "architecture": op.MLP.matrix(),
      "closing": op.MuonClosing(iterations=1, renormalize=True),
    },
    MOMENTUM,
  ),
  # Reads from before the batch: with a window and a bias; with neither
  # momentum nor decay; where weights are scaled; where nothing recurs.
  "delayed": (
    {"architecture": op.MLP(depth=1, bias=True), "delayed": True},
    MOMENTUM,
  ),
  "delayed_steps": (
    {"architecture": op.MLP.matrix(), "delayed": True},
    ("step",),
  ),
  "delayed_moneta": (
    {
      "architecture": op.MLP.matrix(),
      "loss": op.Lp(),
      "closing": op.NormClosing(),
      "delayed": True,
    },
    ("step", "log_decay"),
  ),
  "delayed_rows": (
    {
      "architecture": op.MLP.matrix(),
      "row_scale": 1 / jnp.arange(1.0, 4.0)[None] * jnp.ones((N, 1)),
      "delayed": True,
    },
    ("step",),
  ),
}
# Inner batches of several pieces, too, tested on new sequences only.
PIECES = {
  "pieces": KINDS["pieces"],
  "pieces_of_steps": (
    {"architecture": op.MLP(hidden_factor=2), "inner_batch": 12},
    ("step",),
  ),
  "pieces_of_moneta": (
    {
      "architecture": op.MLP(depth=1, bias=True, residual=False),
      "closing": op.NormClosing(),
      "inner_batch": 12,
    },
    ("step", "log_decay"),
  ),
  "pieces_of_memora": (
    {
      "architecture": op.MLP(depth=1),
      "closing": op.EntropyClosing(),
      "inner_batch": 12,
    },
    ("step", "log_decay"),
  ),
}
# Tested from a state inside an inner batch, over masks and document starts;
# the others on two whole inner batches, which compile faster. What these
# could do wrong beyond that is the same code for all.
STREAMED = ("titans", "pieces", "rows", "moneta", "delayed", "delayed_steps")
# These also read a mix of stored memories.
MIXED = ("pieces", "moneta", "delayed")
WINDOWS = {"omega": 3, "pieces": 2, "delayed": 3}


def _normal(rng, *shape):
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def make(seed=0, t=T, b=B, n=N, k=K, window=1):
  """q, k, v and gates in their natural ranges; masks and document starts."""
  rng = np.random.default_rng(seed)
  normal = functools.partial(_normal, rng)
  keys = normal(b, t, n, k)
  x = {
    "q": normal(b, t, n, k),
    "k": keys / jnp.linalg.norm(keys, axis=-1, keepdims=True),
    "v": normal(b, t, n, k),
    "step": 0.1 * jax.nn.sigmoid(normal(b, t, n, window)),
    "log_decay": -0.2 * jax.nn.sigmoid(normal(b, t, n)),
    "momentum": jax.nn.sigmoid(normal(b, t, n)),
    "threshold": 1 + jax.nn.sigmoid(normal(b, t, n)),
    "weights": jax.nn.softmax(normal(b, t, n, SLOTS + 1)),
  }
  mask = jnp.asarray(rng.random((b, t)) < 0.8)
  starts = jnp.asarray(rng.random((b, t)) < 0.15)
  return x, {"mask": mask, "starts": starts}


def make_params(kind):
  fixed, _ = (KINDS | PIECES)[kind]
  params = fixed["architecture"].init_params(jax.random.key(1), N, K, K)
  closing = fixed.get("closing")
  if isinstance(closing, op.EntropyClosing):
    params = closing.positive(params)
  return params


def call(kind, x, params, implementation=None, state=None, **kwargs):
  fixed, names = (KINDS | PIECES)[kind]
  fixed = {"loss": op.L2(), "inner_batch": 3} | fixed
  gates = {"threshold": x["threshold"]} if kind == "yaad" else {}
  return op.mlp_memory(
    x["q"],
    x["k"],
    x["v"],
    params,
    **fixed,
    **{name: x[name] for name in names},
    loss_gates=gates,
    state=state,
    implementation=implementation,
    **kwargs,
  )


def random_state(kind, x, params, seed=0):
  """A state in the middle of an inner batch: any numbers that can occur."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda x, p: call(kind, x, p)[1], x, params)

  def near(params):
    noise = lambda w: 1 + 0.1 * _normal(rng, *w.shape)
    return {
      name: params[name][None] * noise(w) + 0.01 * _normal(rng, *w.shape)
      for name, w in shapes.theta.items()
    }

  start = near(params)
  if kind == "memora":
    start = jax.tree.map(jnp.abs, start)
  fill = lambda tree: jax.tree.map(lambda w: 0.1 * _normal(rng, *w.shape), tree)
  return op.MLPMemoryState(
    theta=jax.tree.map(lambda w: w + 0.01 * _normal(rng, *w.shape), start),
    start=start,
    momentum=fill(shapes.momentum),
    decay=jax.tree.map(lambda w: jnp.full(w.shape, 0.9), shapes.decay),
    tail=fill(shapes.tail),
    position=jnp.asarray([4, 5]),
  )


def make_memories(kind, params):
  rng = np.random.default_rng(3)
  static = ("ln_gain", "ln_bias")
  return {
    name: w[None, None] + 0.1 * _normal(rng, B, SLOTS, *w.shape)
    for name, w in params.items()
    if name not in static
  }


@functools.cache
def gradients(kind):
  """Values, state and gradients of both forms: one compiled function."""

  def loss(floats, where, out_weights, position, implementation):
    x, params, state, memories = floats
    if state is not None:
      state = state._replace(position=position)
    mix = None
    if memories is not None:
      mix = op.Mix(memories, x["weights"][..., :-1], x["weights"][..., -1])
    y, last = call(
      kind,
      x,
      params,
      implementation,
      state,
      mix=mix,
      max_unaligned_starts=T,
      **where,
    )
    kept = (last.theta, last.start, last.momentum)
    total = sum(jnp.sum(jnp.sin(w)) for w in jax.tree.leaves(kept))
    return jnp.sum(y * out_weights) + total, (y, last)

  gradient = jax.value_and_grad(loss, has_aux=True)

  @jax.jit
  def both(floats, where, out_weights, position):
    run = lambda name: gradient(floats, where, out_weights, position, name)
    (_, got), got_grads = run("xla")
    (_, want), want_grads = run("reference")
    return (got, got_grads), (want, want_grads)

  return both


def both_forms(kind, x, where):
  params = make_params(kind)
  state, position = None, None
  if kind in STREAMED:
    state = random_state(kind, x, params)
    position, state = state.position, state._replace(position=None)
  else:
    x, where = jax.tree.map(lambda a: a[:, :6], x), {}
  memories = make_memories(kind, params) if kind in MIXED else None
  out_weights = _normal(np.random.default_rng(1), *x["v"].shape)
  floats = (x, params, state, memories)
  return gradients(kind)(floats, where, out_weights, position)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_of_the_definition(kind):
  """The definition differentiates the weights of every token by autodiff."""
  x, where = make(window=WINDOWS.get(kind, 1))
  (got, got_grads), (want, want_grads) = both_forms(kind, x, where)
  assert_close(got, want, 2e-5)
  assert_close(got_grads, want_grads, 1e-4)


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_of_a_new_sequence_are_as_in_the_definition(kind):
  """Two inner batches, half of one, and one more token."""
  t = 31
  x, _ = make(t=t, window=WINDOWS.get(kind, 1))
  params = make_params(kind)
  out_weights = _normal(np.random.default_rng(1), *x["v"].shape)

  def loss(x, params, implementation):
    y, state = call(kind, x, params, implementation)
    kept = (state.theta, state.momentum, state.decay)
    total = sum(jnp.sum(jnp.sin(w)) for w in jax.tree.leaves(kept))
    return jnp.sum(y * out_weights) + total, (y, state)

  @jax.jit
  def both(x, params):
    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return run(x, params, "xla"), run(x, params, "reference")

  fixed, _ = PIECES[kind]
  closing = fixed.get("closing", op.Closing())
  rule = make_rule(fixed["architecture"], op.L2(), closing, 12)
  assert num_pieces(rule, 12, K, K) >= 2
  ((_, got), got_grads), ((_, want), want_grads) = both(x, params)
  assert_close(got, want, 2e-5)
  assert_close(got_grads, want_grads, 1e-4)


@pytest.mark.parametrize("decay", [0.9, 0.01, 1e-6, 0.0])
def test_strong_forgetting_is_exact_and_finite(decay):
  x, where = make()
  hard = (jnp.arange(T) % 3 == 1)[None, :, None]
  x["log_decay"] = jnp.where(hard, jnp.log(decay), x["log_decay"])
  x["momentum"] = jnp.where(hard, 0.0, x["momentum"])
  got, want = both_forms("titans", x, where)
  assert_close(got, want, 1e-4)


def _sizes(jaxpr):
  """Sizes of all values in a jaxpr, inner ones too."""
  for eqn in jaxpr.eqns:
    yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))
    for inner in jaxprs_in_params(eqn.params):
      yield from _sizes(inner)


@pytest.mark.parametrize("mixed", [False, True])
def test_no_array_of_tokens_times_parameters(mixed):
  t, k, batch = 512, 32, 16
  net = op.MLP()
  params = net.init_params(jax.random.key(0), 1, k, k)
  x, where = make(t=t, b=1, n=1, k=k)
  weights = {"w_in": params["w_in"], "w_out": params["w_out"]}
  stored = jax.tree.map(
    lambda w: w[None, None] * jnp.ones((1, 2, 1, 1, 1)), weights
  )

  def loss(x, params, stored):
    mix = op.Mix(stored, x["weights"][..., :-1], x["weights"][..., -1])
    y, _ = op.mlp_memory(
      x["q"],
      x["k"],
      x["v"],
      params,
      architecture=net,
      loss=op.L2(),
      inner_batch=batch,
      **{name: x[name] for name in MOMENTUM},
      mix=mix if mixed else None,
      **(where if mixed else {}),
      max_unaligned_starts=0,
    )
    return jnp.sum(y)

  jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, params, stored)
  size = sum(w.size for w in jax.tree.leaves(weights))
  # The weights at the start of every inner batch are the most there is.
  assert max(_sizes(jaxpr.jaxpr)) <= t // batch * size


def test_rows_without_room_become_nan_and_others_do_not():
  x, _ = make()
  starts = np.zeros((B, T), bool)
  starts[1, [1, 2, 4, 5]] = True
  limits = {"starts": jnp.asarray(starts), "max_unaligned_starts": 0}
  run = jax.jit(lambda x: call("rows", x, make_params("rows"), **limits))
  y, state = run(x)
  for a in (y, *state.theta.values()):
    assert np.all(np.isfinite(a[0]))
    assert np.all(np.isnan(a[1]))


def test_one_inner_batch_in_bfloat16():
  """A CPU multiplies operands of bfloat16 in some layouts only, if large."""
  x, _ = make(t=16, k=32)
  network = op.MLP(hidden_factor=2)
  params = network.init_params(jax.random.key(1), N, 32, 32)
  options = {"architecture": network, "loss": op.L2(), "inner_batch": 16}

  @jax.jit
  def run(q, k, v, step, params):
    return op.mlp_memory(q, k, v, params, step=step, **options)[0]

  exact = tuple(x[name] for name in "qkv")
  got = run(*(x.astype(jnp.bfloat16) for x in exact), x["step"], params)
  assert got.dtype == jnp.bfloat16
  expected = run(*exact, x["step"], params)
  assert_close(got.astype(jnp.float32), expected, 5e-2)


@pytest.mark.usefixtures("as_a_user")
def test_errors_name_the_argument():
  x, where = make()
  params = make_params("titans")
  other = random_state("dla", x, make_params("dla"))
  for name, change in {
    "max_unaligned_starts": {"where": where},
    "`momentum`": {"x": x | {"momentum": x["momentum"][:, :-1]}},
    "`params`": {"params": {"w": jnp.zeros((N, K, K))}},
    "`state`": {"state": other},
  }.items():
    options = {"x": x, "params": params, "where": {}, "state": None} | change
    with pytest.raises(ValueError, match=name):
      jax.eval_shape(
        lambda x, params, state, where: call(
          "titans", x, params, state=state, **where
        ),
        **options,
      )
  network = {"architecture": op.MLP(), "inner_batch": 4}
  with pytest.raises(ValueError, match="`loss_gates`"):
    op.mlp_memory(
      x["q"], x["k"], x["v"], {}, **network, loss=op.Huber(), step=x["step"]
    )
  with pytest.raises(ValueError, match="`step` and `coef`"):
    op.mlp_memory(x["q"], x["k"], x["v"], {}, **network, loss=op.L2())
