import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcache_jax.array_typing import Params
from memcache_jax.caching import Cached, Constant
from memcache_jax.layers import InitialMemory, MemoryMixer, NoDecayParam
from memcache_jax.memories import Linear, Memory, SlidingWindowLinear
from tests.layers import cases
from tests.layers.cases import DIM, louder, memory_mixer, run


def test_is_the_definition():
  """The whole layer around linear attention, in float64 NumPy."""
  layer = louder(memory_mixer(Linear()))
  x = np.random.default_rng(0).normal(size=(6, DIM))
  silu = lambda z: z / (1 + np.exp(-z))

  def projected(name):
    z = np.einsum("td,dnk->tnk", x, np.float64(getattr(layer, name).kernel))
    if name == "out_gate":
      return silu(z)
    kernel = np.float64(getattr(layer, f"{name}_conv").kernel)
    padded = np.concatenate([np.zeros((3, *z.shape[1:])), z])
    z = sum(kernel[o] * padded[3 - o : 3 - o + len(z)] for o in range(4))
    return silu(z)

  def unit(z):
    return z / np.sqrt((z**2).sum(-1, keepdims=True) + 1e-6)

  q, k, v = unit(projected("q")), unit(projected("k")), projected("v")
  memory = np.cumsum(np.einsum("tnk,tnv->tnkv", k, v), axis=0)
  y = np.einsum("tnk,tnkv->tnv", q, memory)
  y /= np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
  y = np.einsum(
    "tnv,nvd->td", y * projected("out_gate"), np.float64(layer.out.kernel)
  )
  got, _ = run(layer, jnp.asarray(x[None], jnp.float32))
  np.testing.assert_allclose(got[0], y, atol=1e-4, rtol=1e-4)


class Biased(Linear):
  """Linear attention that adds a learned vector: the least with params."""

  def init_params(self, key, shape) -> Params:
    return {"bias": {"of_read": jax.random.normal(key, (2, shape.value_dim))}}

  def scan(self, params, state, tokens):
    y, state = super().scan(params, state, tokens)
    bias = params["bias"]["of_read"][None, None]
    return y + bias.astype(y.dtype), state


def test_parameters_of_the_memory_are_learned_and_float32(nnx_mode):
  layer = memory_mixer(Biased(), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  params = nnx.state(layer, InitialMemory)
  (leaf,) = jax.tree.leaves(params)
  assert leaf.dtype == jnp.float32
  graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

  @cases.fast_to_compile
  @jax.grad
  def gradient(params):
    y, _ = nnx.merge(graphdef, params, rest)(
      jnp.ones((1, 3, DIM), jnp.bfloat16)
    )
    return jnp.sum(y.astype(jnp.float32))

  assert np.any(gradient(params)["initial"]["bias"]["of_read"][...] != 0)


def test_what_must_not_decay_is_marked():
  layer = memory_mixer(Biased())
  marked = nnx.to_flat_state(nnx.state(layer, NoDecayParam))
  assert sorted(path[0] for path, _ in marked) == ["initial", "norm"]


def test_inspect_returns_the_gates():
  layer = louder(memory_mixer(Cached(Linear(), Constant(4))))
  x = jax.random.normal(jax.random.key(0), (1, 9, DIM))
  mask = jnp.ones((1, 9), bool).at[0, 2].set(False)
  inspect = cases.fast_to_compile(lambda layer, x: layer.inspect(x, mask=mask))
  y, state, weights = inspect(layer, x)
  chex.assert_trees_all_close((y, state), run(layer, x, mask=mask), atol=1e-6)
  total = np.sum(weights, axis=-1)
  np.testing.assert_allclose(total[0, 2], 0)
  np.testing.assert_allclose(np.delete(total, 2, axis=1), 1, atol=1e-5)
  with pytest.raises(ValueError, match=r"`memory` .* got Linear"):
    memory_mixer(Linear()).inspect(x)


def test_a_memory_of_three_methods_is_enough():
  class Last(Memory):
    """Remembers one value."""

    def init_state(self, params, shape, batch, *, max_length=None):
      return jnp.zeros((batch, shape.num_heads, shape.value_dim))

    def step(self, params, state, k, v, gates):
      return v.astype(jnp.float32)

    def read(self, params, memory, q):
      return jnp.broadcast_to(memory[:, None], (*q.shape[:3], memory.shape[-1]))

  layer = memory_mixer(Cached(Last(), Constant(4)))
  y, state = run(layer, jnp.ones((1, 6, DIM)))
  chex.assert_tree_all_finite((y, state))


def test_errors(as_a_user):
  with pytest.raises(ValueError, match="`memory` must be a Memory: got <"):
    MemoryMixer(DIM, 2, Linear, rngs=nnx.Rngs(0))
  layer, x = memory_mixer(Linear()), jnp.ones((2, 3, DIM))
  state = layer.init_state(2, 9)
  for memory in (SlidingWindowLinear(), Cached(Linear(), Constant(4))):
    other = memory_mixer(memory).init_state(2, 9).memory
    with pytest.raises(ValueError, match="`state` must come from the same"):
      layer(x, state._replace(memory=other))
  with pytest.raises(ValueError, match="`conv_width` must be an int"):
    memory_mixer(Linear(), conv_width=0)
  for out_scale in (float("nan"), "a", -1.0):
    with pytest.raises(ValueError, match="`out_scale` must be a number"):
      memory_mixer(Linear(), out_scale=out_scale)
  for other in (jnp.zeros((3, 2, 4, 3)), jnp.zeros((2, 4, 3), jnp.int32)):
    wrong = state.memory._replace(matrix=other)
    with pytest.raises(ValueError, match=r"`state\.matrix` must be float32"):
      layer(x, state._replace(memory=wrong))
