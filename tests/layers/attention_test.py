import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.layers import Attention, _rope
from tests.layers.cases import attention, louder, run, run_pieces

DIM, HEADS, WIDTH = 8, 2, 4


def dense(layer, x, window=None, theta=10_000.0):
  """The definition in float64, with rotations as complex numbers.

  Persistent tokens come first, are not rotated, and every token sees them.
  """
  p = np.zeros((0, DIM))
  if layer.persistent is not None:
    p = np.float64(layer.persistent[...])
  q, k, v, k_of_p, v_of_p = (
    np.einsum("btd,dnk->btnk", x, np.float64(projection.kernel[...]))
    for x, projection in (
      *((x, layer.q), (x, layer.k), (x, layer.v)),
      *((p[None], layer.k), (p[None], layer.v)),
    )
  )
  plain = np.einsum("btnk,bsnk->bnts", q, k_of_p.repeat(len(x), 0))
  t, half = x.shape[1], WIDTH // 2
  angle = np.arange(t)[:, None] * theta ** (-np.arange(half) / half)
  turn = np.exp(1j * angle)[None, :, None]
  q, k = ((a[..., :half] + 1j * a[..., half:]) * turn for a in (q, k))
  logits = np.einsum("btnh,bsnh->bnts", q, np.conj(k)).real / WIDTH**0.5
  age = np.arange(t)[:, None] - np.arange(t)[None]
  visible = (age >= 0) & (age < (window or t))
  weights = np.where(visible, np.exp(logits), 0)
  weights = np.concatenate([np.exp(plain / WIDTH**0.5), weights], axis=-1)
  weights /= weights.sum(-1, keepdims=True)
  v = np.concatenate([v_of_p.repeat(len(x), 0), v], axis=1)
  y = np.einsum("bnts,bsnk->btnk", weights, v)
  return np.einsum("btnk,nkd->btd", y, np.float64(layer.out.kernel[...]))


def inputs(length=40, seed=0):
  return jax.random.normal(jax.random.key(seed), (2, length, DIM))


@pytest.mark.parametrize("window", [None, 1, 5, 30, 100])
def test_is_the_definition(window):
  x = inputs()
  for chunk_size, persistent_tokens in ((64, 0), (40, 2), (7, 3)):
    layer = louder(
      attention(
        window=window,
        persistent_tokens=persistent_tokens,
        chunk_size=chunk_size,
      )
    )
    expected = dense(layer, np.float64(x), window)
    y, _ = run(layer, x)
    np.testing.assert_allclose(y, expected, atol=1e-4)


def test_full_window_is_full_attention():
  x = inputs(12)
  full, windowed = louder(attention()), louder(attention(window=12))
  chex.assert_trees_all_equal(run(full, x)[0], run(windowed, x)[0])


def test_beyond_the_room_is_nan_until_a_document_starts():
  layer = louder(attention())
  x = inputs(12)
  starts = jnp.zeros((2, 12), bool).at[1, 10].set(True)
  start = layer.init_state(2, 7)
  whole, _ = run(layer, x, start, starts=starts)
  steps, _ = run_pieces(layer, x, start, [1] * 12, starts=starts)
  expected, _ = run(layer, x, starts=starts)
  lost = np.zeros((2, 12), bool)
  lost[:, 7:] = True
  lost[1, 10:] = False
  for y in (whole, steps):
    np.testing.assert_array_equal(np.any(np.isnan(y), axis=-1), lost)
    np.testing.assert_allclose(y[~lost], expected[~lost], atol=1e-5)


def test_a_window_streams_for_ever_in_constant_room():
  layer = louder(attention(window=5))
  x = inputs()
  state = layer.init_state(2, 1)
  assert state.keys.shape[1] == 5
  y, state = run_pieces(layer, x, state, [9, 9, 9, 9, 1, 1, 1, 1])
  chex.assert_trees_all_close(y, np.asarray(run(layer, x)[0]), atol=1e-5)
  assert state.keys.shape[1] == 5


def test_a_document_start_forgets_even_nan():
  layer = louder(attention(window=5))
  bad = jnp.full((2, 9, DIM), jnp.nan)
  _, state = run(layer, bad, layer.init_state(2, 9))
  starts = jnp.ones((2, 1), bool)
  y, state = run(layer, inputs(1), state, starts=starts)
  expected, _ = run(layer, inputs(1))
  chex.assert_trees_all_close(y, expected, atol=1e-6)
  y, _ = run(layer, inputs(9), state, starts=jnp.zeros((2, 9), bool))
  chex.assert_tree_all_finite(y)


def test_memory_does_not_grow_with_the_square_of_the_length():
  layer = attention(chunk_size=64)

  def backward(length):
    def loss(x):
      return jnp.sum(layer(x)[0])

    x = jax.ShapeDtypeStruct((1, length, DIM), jnp.float32)
    compiled = jax.jit(jax.grad(loss)).lower(x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert backward(4096) < 5 * backward(1024)


def test_rotation_is_relative_and_keeps_lengths():
  x = inputs(2)[..., None, :]
  position = jnp.array([[3, 10], [1000, 1007]])
  y = _rope.rotate(x, position, 10_000.0)
  np.testing.assert_allclose(
    np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5
  )
  same = jnp.stack([x[0], x[0]])
  y = _rope.rotate(same, position, 10_000.0)
  product = np.einsum("bnk,bnk->bn", y[:, 0], y[:, 1])
  np.testing.assert_allclose(product[0], product[1], atol=1e-3)


def test_errors():
  with pytest.raises(ValueError, match="`head_dim` must be even .* got 3"):
    Attention(DIM, 2, head_dim=3, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="`window` .* got 0"):
    Attention(DIM, 2, window=0, rngs=nnx.Rngs(0))
  x, layer = jnp.ones((1, 3, DIM)), Attention(DIM, 2, rngs=nnx.Rngs(0))
  convolved = Attention(DIM, 2, conv_width=3, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="`state` must be .* with convolutions"):
    layer(x, convolved.init_state(1, 9))
  with pytest.raises(ValueError, match="`state` .* without convolutions"):
    convolved(x, layer.init_state(1, 9))
  with pytest.raises(ValueError, match="`state` must hold the 4 .* room for 5"):
    Attention(DIM, 2, window=4, rngs=nnx.Rngs(0))(
      x, Attention(DIM, 2, window=5, rngs=nnx.Rngs(0)).init_state(1, 9)
    )
