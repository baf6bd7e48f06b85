"""Chunked linear attention against the token-by-token definition."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcache_jax.ops import LinearAttentionState, linear_attention
from memcache_jax.testing import assert_close, relative_error

N, K, V = 2, 6, 5


def _inputs(seed, t, window=1, batch=2, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), dtype)
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  decay = rng.exponential(0.3, (batch, t, N))
  decay = np.where(rng.random((batch, t, N)) < 0.1, np.inf, decay)
  return {
    "q": unit(normal(batch, t, N, K)),
    "k": unit(normal(batch, t, N, K)),
    "v": normal(batch, t, N, V),
    "log_decay": jnp.asarray(-decay, jnp.float32),
    "write": jnp.asarray(rng.random((batch, t, N, window)), jnp.float32),
    "mask": jnp.asarray(rng.random((batch, t)) < 0.7),
    "starts": jnp.asarray(rng.random((batch, t)) < 0.1),
  }


def _state(seed, window, batch=2):
  rng = np.random.default_rng(seed)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  if window == 1:
    return LinearAttentionState(normal(batch, N, K, V))
  return LinearAttentionState(
    normal(batch, N, K, V),
    normal(batch, window - 1, N, K),
    normal(batch, window - 1, N, V),
  )


@functools.partial(jax.jit, static_argnames=("implementation", "chunk_size"))
def _run(inputs, state, weights, implementation, chunk_size=16):
  """Outputs, state, and gradients with respect to every float."""
  flags = {name: inputs[name] for name in ("mask", "starts") if name in inputs}
  floats = {name: x for name, x in inputs.items() if name not in flags}

  def loss(floats, state):
    y, new = linear_attention(
      **floats,
      **flags,
      state=state,
      implementation=implementation,
      chunk_size=chunk_size,
    )
    total = jnp.sum(y.astype(jnp.float32) * weights)
    return total + jnp.sum(jnp.sin(new.matrix)), (y, new)

  grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(floats, state)
  return out, grads


def _check(inputs, state, chunk_size=16, tolerance=2e-5):
  v = inputs["v"]
  weights = jnp.cos(jnp.arange(v.size, dtype=jnp.float32)).reshape(v.shape)
  got = _run(inputs, state, weights, "xla", chunk_size)
  expected = _run(inputs, state, weights, "reference")
  assert_close(got[0], expected[0], tolerance)
  assert_close(got[1], expected[1], 5 * tolerance)


@pytest.mark.parametrize(
  ("t", "window"), [(1, 1), (1, 4), (3, 4), (33, 2), (64, 1), (64, 4)]
)
def test_equals_the_definition(t, window):
  _check(_inputs(t, t, window), _state(t, window))


@pytest.mark.parametrize(
  "missing",
  [
    ("log_decay",),
    ("write",),
    ("log_decay", "write", "mask", "starts"),
    ("mask", "starts"),
    ("log_decay", "starts"),
  ],
  ids="-".join,
)
def test_every_option_may_be_missing(missing):
  inputs = _inputs(0, 37)
  for name in missing:
    del inputs[name]
  _check(inputs, _state(0, 1))


@settings(max_examples=10, deadline=None)
@given(
  lengths=st.sampled_from([(7, 16), (40, 5)]),
  window=st.sampled_from([1, 3]),
  seed=st.integers(0, 1000),
)
def test_any_masks_and_documents(lengths, window, seed):
  t, chunk_size = lengths
  _check(_inputs(seed, t, window), _state(seed, window), chunk_size)


def test_chunk_padding_leaves_no_trace():
  """The state after T tokens is that after T - 1, plus one."""
  inputs = _inputs(1, 128)
  scan = jax.jit(
    lambda inputs, state, size: linear_attention(
      **inputs, state=state, chunk_size=size
    ),
    static_argnums=2,
  )
  cut = lambda a, b: {name: x[:, a:b] for name, x in inputs.items()}
  for t in (65, 127):
    whole = scan(cut(0, t), None, 64)
    before = scan(cut(0, t - 1), None, 64)[1]
    y, state = scan(cut(t - 1, t), before, 64)
    assert_close(state, whole[1])
    assert_close(y, whole[0][:, -1:])
    assert_close(scan(cut(0, t), None, 16), whole)


@pytest.mark.parametrize("gate", [0.9, 0.5, 0.2, 0.01, 1e-6, 1e-30, 0.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_strong_forgetting_is_finite_and_exact(gate, dtype):
  inputs = _inputs(2, 256, dtype=dtype)
  del inputs["mask"], inputs["starts"]
  constant = np.full((2, 256, N), gate)
  mixed = np.full((2, 256, N), 0.999)
  mixed[:, [3, 77, 128, 191]] = gate
  tolerance = 2e-5 if dtype == jnp.float32 else 3e-2
  with np.errstate(divide="ignore"):
    for decay in (constant, mixed):
      inputs["log_decay"] = jnp.asarray(np.log(decay), jnp.float32)
      _check(inputs, _state(2, 1), 64, tolerance)


@pytest.mark.parametrize("t", [256, 8192, 65_536])
def test_bfloat16_operands_do_not_drift(t):
  rng = np.random.default_rng(0)
  positive = lambda: jnp.asarray(rng.random((1, t, 1, 16)), jnp.bfloat16)
  q, k, v = positive(), positive(), positive()
  scan = jax.jit(linear_attention)
  y, state = scan(q, k, v)
  exact = [x.astype(jnp.float32) for x in (q, k, v)]
  expected, expected_state = scan(*exact)
  last = lambda x: x[:, -64:].astype(jnp.float32)
  assert relative_error(last(y), last(expected)) < 0.02
  assert relative_error(state.matrix, expected_state.matrix) < 0.02
  assert state.matrix.dtype == jnp.float32


def test_nan_in_masked_tokens_reaches_nothing():
  inputs = _inputs(3, 40, 3)
  hidden = ~inputs["mask"]
  poisoned = dict(inputs)
  for name in ("q", "k", "v", "log_decay", "write"):
    x = inputs[name]
    flags = hidden.reshape(hidden.shape + (1,) * (x.ndim - 2))
    poisoned[name] = jnp.where(flags, jnp.nan, x)
  weights = jnp.ones_like(inputs["v"])
  state = _state(3, 3)
  for implementation in ("xla", "reference"):
    clean = _run(inputs, state, weights, implementation)
    chex.assert_trees_all_equal(
      _run(poisoned, state, weights, implementation), clean
    )


def test_no_tokens():
  inputs = {name: x[:, :0] for name, x in _inputs(0, 4).items()}
  for implementation in ("xla", "reference"):
    state = _state(0, 1)
    y, after = linear_attention(
      **inputs, state=state, implementation=implementation
    )
    assert y.shape == (2, 0, N, V)
    chex.assert_trees_all_equal(after, state)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": jnp.zeros((2, 5, N, K))}, r"`k` must have axes \(b t n k\)"),
    ({"v": jnp.zeros((2, 4, N, V, 1))}, r"got shape \(2, 4, 2, 5, 1\)"),
    ({"k": jnp.zeros((2, 4, N, K), jnp.bfloat16)}, "the same dtype"),
    ({"q": jnp.zeros((2, 4, N, K), jnp.int32)}, "`q` must have a floating"),
    ({"mask": jnp.zeros((2, 4), jnp.int32)}, "`mask` must be boolean"),
    ({"starts": jnp.zeros((2, 3), bool)}, "`starts` must have axes"),
    ({"chunk_size": 0}, "`chunk_size` must be an int of at least 1"),
    ({"implementation": "numpy"}, "`implementation` must be None or one of"),
    ({"state": _state(0, 3)}, "the same window"),
    ({"state": _state(0, 1, batch=3)}, "`state.matrix` must have axes"),
  ],
)
def test_wrong_arguments(change, message):
  with pytest.raises(ValueError, match=message):
    linear_attention(**{**_inputs(0, 4), **change})


def test_a_kernel_that_does_not_exist():
  inputs = _inputs(0, 4)
  with pytest.raises(NotImplementedError, match="cannot run as a 'triton'"):
    linear_attention(**inputs, implementation="triton")
