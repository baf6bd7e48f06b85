import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memcache_jax.layers import (
  Attention,
  Block,
  NoDecayParam,
  RMSNorm,
  SwiGLU,
  weight_decay_mask,
)
from memcache_jax.memories import Linear
from tests.layers.cases import attention, fast_to_compile, memory_mixer, run


def test_is_pre_norm_residual():
  block = Block(attention(), 16, rngs=nnx.Rngs(1))
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)

  @fast_to_compile
  def expected(block, x):
    h = x + block.mixer(block.mixer_norm(x))[0]
    return h + block.feed_forward(block.feed_forward_norm(h))

  y, _ = run(block, x)
  np.testing.assert_allclose(y, expected(block, x), atol=1e-6)


def test_swiglu():
  layer = SwiGLU(8, 12, rngs=nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(1, 3, 8))
  gate, up, down = (
    np.float64(p.kernel[...]) for p in (layer.gate, layer.up, layer.down)
  )
  z = x @ gate
  expected = (z / (1 + np.exp(-z)) * (x @ up)) @ down
  np.testing.assert_allclose(
    layer(jnp.asarray(x, jnp.float32)), expected, atol=1e-6
  )
  sizes = {d: SwiGLU(d, rngs=nnx.Rngs(0)).up.kernel.shape[1] for d in (96, 768)}
  assert sizes == {96: 256, 768: 2048}


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_scale_of_the_output_projections(scale):
  options = {"out_scale": scale, "rngs": nnx.Rngs(0)}
  stds = [
    np.std(SwiGLU(64, 64, **options).down.kernel[...]),
    np.std(Attention(64, 2, **options).out.kernel[...]),
    np.std(memory_mixer(Linear(), value_dim=64, **options).out.kernel[...]),
  ]
  np.testing.assert_allclose(stds, 0.02 * scale, rtol=0.1)


def test_weight_decay_leaves_marked_parameters_alone():
  block = Block(memory_mixer(Linear()), 16, rngs=nnx.Rngs(0))
  params = nnx.state(block, nnx.Param)
  optimizer = optax.add_decayed_weights(0.5, weight_decay_mask)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  changed = {
    path: bool(np.any(variable[...] != 0))
    for path, variable in nnx.to_flat_state(updates)
  }
  marked = {p for p, _ in nnx.to_flat_state(nnx.state(block, NoDecayParam))}
  assert {path for path, moved in changed.items() if not moved} == marked
  assert {path[-1] for path in marked} == {"scale"}


def test_rms_norm():
  norm = RMSNorm((2, 3))
  norm.scale[...] = jnp.arange(6.0).reshape(2, 3)
  x = np.random.default_rng(0).normal(size=(1, 4, 2, 3))
  expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  expected *= np.arange(6.0).reshape(2, 3)
  got = norm(jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(got, expected, atol=1e-5)


def test_errors(as_a_user):
  block = Block(attention(), 16, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="`mixer` must be a MemoryMixer .* Att"):
    block.inspect(jnp.ones((1, 3, 8)))
  with pytest.raises(ValueError, match=r"`x` .* d=8"):
    block(jnp.ones((1, 3, 9)))
