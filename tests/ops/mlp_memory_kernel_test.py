"""Inner batches of networks as a TPU kernel, against their definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from memcache_jax.ops import mlp_memory as op
from memcache_jax.testing import assert_close

K, N = 32, 2
GATES = ("step", "log_decay", "momentum")
KERNEL = 'kernel_name = "memcache_mlp_memory_batches"'

# What a memory is made of, its gates, and how many tokens each step writes.
CASES = {
  "titans": ({"architecture": op.MLP(hidden_factor=2)}, GATES, 2),
  "rows": (
    {
      "architecture": op.MLP.ttt_linear(),
      "row_scale": 1 / jnp.arange(1.0, 4.0)[None] * jnp.ones((N, 1)),
    },
    ("step",),
    1,
  ),
  "matrix": (
    {"architecture": op.MLP.matrix(), "loss": op.Dot()},
    ("step", "log_decay"),
    1,
  ),
  "gated": ({"architecture": op.GatedMLP(norm=True)}, GATES, 1),
}
# Tested over masks, document starts and a state inside an inner batch; others
# on a new sequence that ends inside of one.
STREAMED = ("titans", "rows")


def _inputs(name, t=8, dtype=jnp.float32):
  options, gates, window = CASES[name]
  rng = np.random.default_rng(t)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  params = options["architecture"].init_params(jax.random.key(0), N, K, K)
  inputs = {
    x: (normal(1, t, N, K) / K**0.25).astype(dtype) for x in ("q", "k", "v")
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
    run = jax.grad(loss, has_aux=True) if name == "titans" else loss
    return run(inputs)

  return run


def _run(name, implementation):
  return jax.block_until_ready(_jitted(name, implementation)(_inputs(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name):
  expected = _run(name, "reference")
  # A simulated TPU, whose memory holds nan until it is written.
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  ):
    got = _run(name, "mosaic_tpu")
  assert_close(got, expected)


@pytest.mark.parametrize(
  ("implementation", "platform", "tokens", "kernels"),
  [
    (None, "tpu", 8, 1),
    (None, "tpu", 3, 0),  # one inner batch
    ("mosaic_tpu", "tpu", 3, 1),
    ("xla", "tpu", 8, 0),
    (None, "cpu", 8, 0),
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
def test_the_kernel_says_what_it_cannot(change, reason):
  inputs, change = _inputs("matrix"), dict(change)
  if change.get("mix"):
    memories = {"w": jnp.zeros((1, 2, N, K, K))}
    change["mix"] = op.Mix(
      memories, jnp.ones((1, 8, N, 2)), inputs["step"][..., 0]
    )
  if width := change.pop("width", None):
    inputs |= {x: jnp.zeros((1, 8, N, width)) for x in ("q", "k", "v")}
    inputs["params"] = {"w": jnp.zeros((N, width, width))}
  with pytest.raises(NotImplementedError, match=reason):
    _call("matrix", "mosaic_tpu", inputs, **change)
