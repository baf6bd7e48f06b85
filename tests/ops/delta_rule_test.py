"""The delta rules, also RWKV-7's, by chunks against their definitions.

Most tests share one length, so that each rule is compiled once for them.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from memcache_jax.ops import delta_rule, diagonal_delta_rule
from memcache_jax.ops.delta_rule import _triangular
from memcache_jax.testing import assert_close, relative_error

RULES = ("delta", "gated", "diagonal")
GATES = {
  "delta": ("beta",),
  "gated": ("beta", "log_decay"),
  "diagonal": ("log_decay", "removal_key", "rate"),
}
N, K, V = 2, 8, 6
LENGTH = 100
CHUNK = {"delta": 64, "gated": 32, "diagonal": 16}
every_rule = pytest.mark.parametrize("rule", RULES)


def _inputs(rule, t=LENGTH, seed=0, dtype=jnp.float32):
  """Everything an op takes, with gates of exactly 0 and 1 among them."""
  rng = np.random.default_rng(seed)
  normal = lambda *axes: rng.standard_normal(axes)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  width = (K,) if rule == "diagonal" else ()
  decay = rng.exponential(0.3, (2, t, N, *width))
  decay = np.where(rng.random(decay.shape) < 0.05, np.inf, decay)
  arrays = {
    "q": unit(normal(2, t, N, K)),
    "k": unit(normal(2, t, N, K)),
    "v": normal(2, t, N, V),
    "beta": np.clip(2.4 * rng.random((2, t, N)) - 0.2, 0, 2),
    "log_decay": -np.where(rng.random(decay.shape) < 0.1, 0.0, decay),
    "removal_key": unit(normal(2, t, N, K)),
    "rate": np.clip(1.2 * rng.random((2, t, N, K)) - 0.1, 0, 1),
    "state": normal(2, N, K, V),
    "initial": normal(N, K, V),
  }
  gates = GATES["gated"] + GATES["diagonal"]
  arrays = {
    name: jnp.asarray(x, dtype if name in "qkv" else jnp.float32)
    for name, x in arrays.items()
    if name not in gates or name in GATES[rule]
  }
  return arrays | {
    "mask": jnp.asarray(rng.random((2, t)) < 0.8),
    "starts": jnp.asarray(rng.random((2, t)) < 0.05),
  }


def _op(rule):
  return diagonal_delta_rule if rule == "diagonal" else delta_rule


def _run(rule, inputs, implementation, chunk_size=None):
  """Outputs, state, and gradients with respect to every float."""
  # All by place: jit compiles anew for an argument that is left out.
  return _compiled(rule, inputs, implementation, chunk_size or CHUNK[rule])


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _compiled(rule, inputs, implementation, chunk_size):
  flags = {name: inputs[name] for name in ("mask", "starts") if name in inputs}
  floats = {name: x for name, x in inputs.items() if name not in flags}

  def loss(floats):
    y, state = _op(rule)(
      **floats, **flags, implementation=implementation, chunk_size=chunk_size
    )
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    total = jnp.sum(y.astype(jnp.float32) * weights)
    return total + jnp.sum(jnp.sin(state)), (y, state)

  grads, out = jax.grad(loss, has_aux=True)(floats)
  return out, grads


def _check(rule, inputs, chunk_size=None, tolerance=2e-5):
  got = _run(rule, inputs, "xla", chunk_size)
  expected = _run(rule, inputs, "reference")
  assert_close(got[0], expected[0], tolerance)
  assert_close(got[1], expected[1], 5 * tolerance)


@pytest.mark.parametrize(
  ("rule", "t", "chunk_size", "missing"),
  [
    ("delta", 1, 64, ("state",)),
    ("delta", 65, 64, ("initial", "mask")),
    ("gated", 7, 5, ()),
    ("gated", 63, 64, ("state", "initial", "mask", "starts")),
    ("diagonal", 64, 8, ("state", "initial")),
  ],
)
def test_any_length_and_every_option_may_be_missing(
  rule, t, chunk_size, missing
):
  inputs = _inputs(rule, t, seed=t)
  for name in missing:
    del inputs[name]
  _check(rule, inputs, chunk_size)


@every_rule
def test_any_masks_and_documents(rule):
  @settings(max_examples=5, deadline=None)
  @given(seed=st.integers(0, 1000))
  def check(seed):
    _check(rule, _inputs(rule, seed=seed))

  check()


@every_rule
def test_nan_in_masked_tokens_reaches_nothing(rule):
  inputs = _inputs(rule, seed=1)
  poisoned = dict(inputs)
  for name in ("q", "k", "v", *GATES[rule]):
    x = inputs[name]
    exists = inputs["mask"].reshape(2, LENGTH, *[1] * (x.ndim - 2))
    poisoned[name] = jnp.where(exists, x, jnp.nan)
  for implementation in ("xla", "reference"):
    clean = _run(rule, inputs, implementation)
    chex.assert_trees_all_equal(_run(rule, poisoned, implementation), clean)


@pytest.mark.parametrize("rule", ["gated", "diagonal"])
@pytest.mark.parametrize("gate", [1.0, 0.9, 0.2, 1e-6, 1e-30, 0.0])
def test_strong_forgetting_is_finite_and_exact(rule, gate):
  inputs = _inputs(rule, seed=2)
  shape = inputs["log_decay"].shape
  rare = np.full(shape, 0.999)
  rare[:, [3, 40, 77]] = gate
  with np.errstate(divide="ignore"):
    for decay in (np.full(shape, gate), rare):
      inputs["log_decay"] = jnp.asarray(np.log(decay), jnp.float32)
      _check(rule, inputs)


@every_rule
@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_gates_of_zero_and_one(rule, gate):
  inputs = _inputs(rule, seed=4)
  name = "rate" if rule == "diagonal" else "beta"
  _check(rule, inputs | {name: jnp.full_like(inputs[name], gate)})


def _keys(spread, length=1.0):
  """Tokens whose keys are alike, of one length, unmasked, in one document."""
  inputs = _inputs("delta", seed=5)
  k = np.asarray(inputs["k"], np.float64)
  k = k[:, :1] + spread * k
  k *= length / np.linalg.norm(k, axis=-1, keepdims=True)
  every = jnp.ones_like(inputs["mask"])
  flags = {"mask": every, "starts": ~every}
  return inputs | flags | {"k": jnp.asarray(k, jnp.float32)}


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 1e3])
@pytest.mark.parametrize("length", [1.0, 100.0])
@pytest.mark.parametrize("strength", [0.5, 1.0, 1.9])
def test_keys_that_are_alike_lose_no_accuracy(spread, length, strength):
  inputs = _keys(spread, length)
  beta = jnp.full_like(inputs["beta"], strength / length**2)
  _check("delta", inputs | {"beta": beta})


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3])
def test_errors_are_those_of_rounding_where_nothing_is_forgotten(spread):
  """At ``beta |k|^2 = 2`` the rule itself does not forget an error.

  For equal keys each token multiplies the memory by -1, so that a write
  strength off by one rounding is off by one more with every token. The
  tolerance is what such a rounding of all of them does to the definition.
  """
  inputs = _keys(spread)
  inputs["beta"] = jnp.full_like(inputs["beta"], 2.0)
  near = inputs | {"beta": jnp.full_like(inputs["beta"], 2.0 - 2.0**-21)}
  expected = _run("delta", inputs, "reference")
  rounded = _run("delta", near, "reference")
  got = _run("delta", inputs, "xla")
  chex.assert_tree_all_finite(got)
  trees = zip(*map(jax.tree.leaves, (got, expected, rounded)), strict=True)
  for leaf, expected_leaf, rounded_leaf in trees:
    tolerance = max(2e-5, 2 * relative_error(rounded_leaf, expected_leaf))
    assert relative_error(leaf, expected_leaf) <= tolerance < 1e-3


def test_a_memory_that_grows_grows_like_the_definition():
  """Above ``beta |k|^2 = 2``, here by a factor of 1.2 per token."""
  inputs = _keys(0.0)
  inputs["beta"] = jnp.full_like(inputs["beta"], 2.2)
  got, expected = (_run("delta", inputs, x)[0] for x in ("xla", "reference"))
  assert relative_error(expected[1], 0 * expected[1]) > 1e6
  assert_close(got, expected, 1e-4)


def test_bfloat16_operands_and_a_float32_state():
  inputs = _inputs("gated", seed=6, dtype=jnp.bfloat16)
  exact = {
    name: x.astype(jnp.float32) if name in ("q", "k", "v") else x
    for name, x in inputs.items()
  }
  (y, state), grads = _run("gated", inputs, "xla")
  chex.assert_type((y, state), (jnp.bfloat16, jnp.float32))
  expected = _run("gated", exact, "reference")
  # One rounding to bfloat16 is 4e-3 at most.
  assert_close(((y, state), grads), expected, 1e-2)


def test_one_decay_for_all_channels_is_the_gated_rule():
  inputs = _inputs("gated", seed=7)
  expected = _run("gated", inputs, "xla")[0]
  beta, log_decay = inputs.pop("beta")[..., None], inputs["log_decay"]
  log_decay = jnp.broadcast_to(log_decay[..., None], inputs["k"].shape)
  inputs |= {
    "k": beta * inputs["k"],
    "log_decay": log_decay,
    "removal_key": inputs["k"],
    "rate": beta * jnp.exp(log_decay),
  }
  assert_close(_run("diagonal", inputs, "xla")[0], expected)


def test_a_full_write_replaces_the_value_of_a_unit_key():
  inputs = _inputs("gated", seed=8)
  inputs |= {"beta": jnp.ones_like(inputs["beta"]), "q": inputs["k"]}
  y, _ = _run("gated", inputs, "xla")[0]
  assert_close(y, jnp.where(inputs["mask"][..., None, None], inputs["v"], 0))


@every_rule
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_no_tokens_change_nothing(rule, implementation):
  inputs = _inputs(rule, 0)
  y, after = _op(rule)(**inputs, implementation=implementation)
  chex.assert_shape(y, (2, 0, N, V))
  chex.assert_trees_all_equal(after, inputs["state"])


def test_triangular_systems_are_solved_and_differentiated_twice():
  rng = np.random.default_rng(0)
  alike = np.full((64, 64), 2.0)  # equal keys, written at strength 2
  strict = np.tril([rng.normal(size=(64, 64)) / 8, alike], -1)
  right = rng.normal(size=(2, 64, 4))
  solve = jax.jit(
    lambda strict, right: _triangular.solve(
      jnp.tril(strict, -1), right, jnp.float32
    )
  )
  got = solve(jnp.float32(strict), jnp.float32(right))
  assert relative_error(got, np.linalg.solve(np.eye(64) + strict, right)) < 2e-6
  inputs = jnp.float32(strict[:1, :4, :4]), jnp.float32(right[:1, :4])
  check_grads(solve, inputs, 2, modes=["rev"], atol=0.1, rtol=0.1)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
  ("rule", "change", "message"),
  [
    (
      "delta",
      {"k": jnp.zeros((2, 4, N, K + 1))},
      r"`k` must have axes \(b t n k\) with k=8 as in `q`: got shape",
    ),
    ("delta", {"beta": jnp.zeros((2, 4, N, 1))}, "`beta` must have axes"),
    ("delta", {"q": jnp.zeros((2, 4, N, K), jnp.bfloat16)}, "the same dtype"),
    ("gated", {"log_decay": jnp.zeros((2, 3, N))}, "`log_decay` must have"),
    ("gated", {"beta": jnp.zeros((2, 4, N), jnp.int32)}, "got int32"),
    ("diagonal", {"rate": jnp.zeros((2, 4, N))}, "`rate` must have axes"),
    ("delta", {"state": jnp.zeros((2, N, V, K))}, "`state` must have axes"),
    ("delta", {"initial": jnp.zeros((2, N, K, V))}, "`initial` must have axes"),
    ("diagonal", {"mask": jnp.zeros((2, 4))}, "`mask` must be boolean: got"),
    ("delta", {"starts": jnp.zeros((2, 3), bool)}, "`starts` must have axes"),
    ("diagonal", {"chunk_size": 0}, "`chunk_size` must be an int of at least"),
    ("delta", {"implementation": "fast"}, "`implementation` must be None or"),
  ],
)
def test_wrong_arguments(rule, change, message):
  with pytest.raises(ValueError, match=message):
    _op(rule)(**{**_inputs(rule, 4), **change})


@pytest.mark.parametrize("rule", ["delta", "diagonal"])
def test_a_kernel_that_does_not_exist(rule):
  with pytest.raises(NotImplementedError, match="cannot run as a 'triton'"):
    _op(rule)(**_inputs(rule, 4), implementation="triton")
