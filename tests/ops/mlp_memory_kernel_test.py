"""Inner batches of networks as kernels, against their definition."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.ops import mlp_memory as op
from memcache_jax.testing import assert_close

K, N = 32, 2
GATES = ("step", "log_decay", "momentum")
KERNEL = 'name = "memcache_mlp_memory_batches"'

# What a memory is made of, its gates, how many tokens each step writes, and the
# width of values; keys have that of K.
CASES = {
  "titans": ({"architecture": op.MLP(hidden_factor=2)}, GATES, 2, 32),
  "rows": (
    {
      "architecture": op.MLP(hidden_factor=2, bias=True),
      "row_scale": 1 / jnp.arange(1.0, 4.0)[None] * jnp.ones((N, 1)),
    },
    ("step",),
    1,
    32,
  ),
  "matrix": (
    {"architecture": op.MLP.matrix(), "loss": op.Dot()},
    ("step", "log_decay"),
    1,
    96,
  ),
  "gated": ({"architecture": op.GatedMLP(norm=True)}, GATES, 1, 32),
}
# Tested over masks, document starts and a state inside an inner batch; others
# on a new sequence that ends inside of one.
STREAMED = ("titans", "rows")


def _inputs(name, t=8, dtype=jnp.float32):
  options, gates, window, v = CASES[name]
  rng = np.random.default_rng(t)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  params = options["architecture"].init_params(jax.random.key(0), N, K, v)
  inputs = {
    x: (normal(1, t, N, width) / K**0.25).astype(dtype)
    for x, width in (("q", K), ("k", K), ("v", v))
  }
  every = {
    "step": jax.nn.sigmoid(normal(1, t, N, window)) / 8,
    "log_decay": -jax.nn.softplus(normal(1, t, N)),
    "momentum": jax.nn.sigmoid(normal(1, t, N)),
  }
  inputs |= {x: every[x] for x in gates}
  return inputs | {"params": params}


def _call(name, implementation, inputs, **others):
  options = {"loss": op.L2(), "inner_batch": 3} | CASES[name][0] | others
  return op.mlp_memory(**inputs, **options, implementation=implementation)


@functools.cache
def _jitted(name, implementation):
  @jax.jit
  def run(inputs):
    def loss(inputs):
      others, state = {}, None
      if name in STREAMED:
        begin = jax.tree.map(lambda x: x[:, :1], inputs | {"params": {}})
        begin |= {"params": inputs["params"]}
        _, state = _call(name, "xla", begin)
        index = jnp.arange(inputs["q"].shape[1])[None]
        others = {"mask": index != 2, "starts": index == 5}
        others |= {"state": state, "max_unaligned_starts": 1}
      y, state = _call(name, implementation, inputs, **others)
      terms = jax.tree.map(lambda x: jnp.sum(jnp.sin(x)), (y, state.theta))
      return sum(jax.tree.leaves(terms)), (y, state)

    # Gradients are those of the XLA form: once is enough.
    once = name == "titans" and implementation != "triton"
    return (jax.grad(loss, has_aux=True) if once else loss)(inputs)

  return run


def _run(name, implementation):
  return jax.block_until_ready(_jitted(name, implementation)(_inputs(name)))


@functools.cache
def _expected(name):
  return _run(name, "reference")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
  # A simulated TPU, whose memory holds nan until it is written.
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ):
    got = _run(name, "mosaic_tpu")
  assert_close(got, _expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_kernel_equals_the_definition(name, monkeypatch):
  """Loads of a simulated one find nan by default; all has several blocks."""
  kernel = importlib.import_module(
    "memcache_jax.pallas_kernels.mlp_memory.triton_batches"
  )

  def run(*operands, config):
    config = dataclasses.replace(config, columns=16, inner=16)
    return fwd(*operands, config=config, interpret=True)

  fwd = kernel.fwd
  monkeypatch.setattr(kernel, "fwd", run)
  assert_close(_run(name, "triton")[1], _expected(name)[1])


@pytest.mark.parametrize(
  ("implementation", "platform", "tokens", "kernels"),
  [
    (None, "tpu", 8, 1),
    (None, "tpu", 3, 0),  # one inner batch
    ("mosaic_tpu", "tpu", 3, 1),
    ("xla", "tpu", 8, 0),
    (None, "cpu", 8, 0),
    ("triton", "cuda", 8, 2),  # of whole inner batches, and of what is left
    (None, "cuda", 8, 0),
  ],
)
def test_the_platform_decides_when_nobody_does(
  implementation, platform, tokens, kernels
):
  inputs = _inputs("gated", tokens, jnp.bfloat16)
  run = jax.jit(lambda inputs: _call("gated", implementation, inputs)[0])
  text = run.trace(inputs).lower(lowering_platforms=(platform,)).as_text()
  assert text.count(KERNEL) == kernels


@pytest.mark.parametrize(
  ("implementation", "kernels"), [(None, 0), ("mosaic_tpu", 2)]
)
def test_what_is_differentiated_runs_as_a_kernel_if_asked(
  implementation, kernels
):
  inputs = _inputs("matrix")

  def loss(inputs):
    return jnp.sum(_call("matrix", implementation, inputs)[0] ** 2)

  traced = jax.jit(jax.grad(loss)).trace(inputs)
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  assert text.count(KERNEL) == kernels


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "triton"])
@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"loss": op.Lp()}, "its loss is L2 or Dot"),
    ({"closing": op.EntropyClosing()}, "nothing happens after .* Entropy"),
    ({"inner_batch": 128}, "read in pieces: got 128"),
    ({"inner_batch": 107}, "read in pieces: got 107"),
    ({"delayed": True}, "not those before their batch"),
    ({"mix": True}, "not a mix"),
    ({"width": 40}, "multiples of 32: got 40"),
  ],
)
def test_the_kernels_say_what_they_cannot(implementation, change, reason):
  inputs, change = _inputs("matrix"), dict(change)
  if change.get("mix"):
    memories = {"w": jnp.zeros((1, 2, *inputs["params"]["w"].shape))}
    change["mix"] = op.Mix(
      memories, jnp.ones((1, 8, N, 2)), inputs["step"][..., 0]
    )
  if width := change.pop("width", None):
    inputs |= {x: jnp.zeros((1, 8, N, width)) for x in ("q", "k", "v")}
    inputs["params"] = {"w": jnp.zeros((N, width, width))}
  with pytest.raises(NotImplementedError, match=reason):
    _call("matrix", implementation, inputs, **change)


@pytest.mark.parametrize(
  ("architecture", "width", "inner_batch", "reason"),
  [
    (op.MLP(depth=3), 64, 16, "one hidden layer at most: got 3 maps"),
    (op.MLP.matrix(), 288, 16, "its key width is up to 256: got 288"),
    (op.MLP.ttt_linear(), 96, 16, "width of a norm is a power of 2: got 96"),
    (op.MLP.ttt_linear(), 64, 17, "up to 16 tokens in float32: got 17"),
  ],
)
def test_the_gpu_kernel_says_what_it_cannot(
  architecture, width, inner_batch, reason
):
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = jax.eval_shape(
    lambda: architecture.init_params(jax.random.key(0), N, width, width)
  )
  x, step = array(1, 8, N, width), array(1, 8, N, 1)
  run = functools.partial(
    op.mlp_memory,
    architecture=architecture,
    loss=op.L2(),
    inner_batch=inner_batch,
    implementation="triton",
  )
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(
      lambda x, params, step: run(x, x, x, params, step=step), x, params, step
    )
