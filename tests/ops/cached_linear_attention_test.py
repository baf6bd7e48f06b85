"""Fused segments: the XLA form and the kernels against the definition."""

import dataclasses
import functools
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from memcache_jax.ops import cached_linear_attention
from memcache_jax.testing import assert_close

# Kernels are simulated.
pytestmark = pytest.mark.slow

KERNELS = "memcache_jax.pallas_kernels.linear_attention"


class Case(NamedTuple):
  tokens: int
  length: int
  rows: int = 1
  heads: int = 1
  key: int = 32
  value: int = 32
  decays: bool = False
  carried: int = 0
  state: bool = False
  fresh: bool = False
  write_mode: str = "independent"
  dtype: jnp.dtype = jnp.float32

  @property
  def segments(self):
    return -(-self.tokens // self.length)


CASES = {
  "one_token": Case(1, 16, carried=1, write_mode="checkpoint"),
  "plain": Case(63, 16, key=64, value=96),
  "decay": Case(65, 32, decays=True, state=True, fresh=True),
  "carried": Case(
    200,
    64,
    rows=2,
    heads=3,
    decays=True,
    carried=2,
    state=True,
    fresh=True,
    write_mode="checkpoint",
  ),
  "blocks": Case(700, 128, decays=True, write_mode="checkpoint"),
  "wide": Case(63, 32, heads=3, key=192, value=256),
  # Of more tokens than lanes: one segment, and several that divide them oddly.
  "long": Case(300, 272, decays=True),
  "pieces": Case(400, 48, decays=True, write_mode="checkpoint"),
}
# Of no multiple of a block, and of several segments in one.
GPU_CASES = {
  "one_token": CASES["one_token"],
  "plain": CASES["plain"],
  "carried": CASES["carried"],
  "odd": Case(150, 20, key=96, decays=True, state=True),
}


def _arrays(case: Case):
  b, t, n, k, v = case.rows, case.tokens, case.heads, case.key, case.value
  rng = np.random.default_rng(t)
  normal = lambda *axes: jnp.asarray(rng.standard_normal(axes), jnp.float32)
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  arrays = {
    "q": unit(normal(b, t, n, k)).astype(case.dtype),
    "k": unit(normal(b, t, n, k)).astype(case.dtype),
    "v": normal(b, t, n, v).astype(case.dtype),
    # Also where a token may not read, which must not matter.
    "weights": normal(b, t, n, case.carried + case.segments),
    "own_weight": normal(b, t, n),
  }
  if case.decays:
    log_decay = -0.1 * jnp.exp(normal(b, t, n))
    arrays["log_decay"] = log_decay.at[:, 5::40].set(-jnp.inf)
    arrays["write"] = jax.nn.sigmoid(normal(b, t, n))
  if case.carried:
    arrays["memories"] = normal(b, case.carried, n, k, v)
  if case.state:
    arrays["state"] = normal(b, n, k, v)
  gradients = normal(b, t, n, v), normal(b, case.segments, n, k, v)
  return arrays, gradients


def _run(case: Case, implementation):
  """Values, and the gradients of all arrays."""
  fresh = None
  if case.fresh:
    fresh = np.arange(case.rows * case.segments) % 3 == 2
    fresh = fresh.reshape(case.rows, -1)

  def loss(arrays, gradients):
    outputs = cached_linear_attention(
      **arrays,
      fresh=None if fresh is None else jnp.asarray(fresh),
      segment_length=case.length,
      write_mode=case.write_mode,
      implementation=implementation,
    )
    products = jax.tree.map(
      lambda x, d: jnp.vdot(x.astype(jnp.float32), d), outputs, gradients
    )
    return sum(products), outputs

  return jax.jit(jax.grad(loss, has_aux=True))(*_arrays(case))


@functools.cache
def _expected(case: Case):
  return _run(case, "reference")


def _interpreted(case: Case, **options):
  """On a simulated TPU, whose memory holds nan until it is written."""
  with pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan", **options)
  ):
    return jax.block_until_ready(_run(case, "mosaic_tpu"))


@pytest.mark.parametrize("name", CASES)
def test_xla_equals_the_definition(name):
  assert_close(_run(CASES[name], "xla"), _expected(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_definition(name):
  assert_close(_interpreted(CASES[name]), _expected(CASES[name]))


def test_states_in_main_memory(monkeypatch, capsys):
  config = importlib.import_module(f"{KERNELS}.config")
  choose = config.config
  streamed = lambda call: dataclasses.replace(choose(call), streamed=True)
  assert not choose(config.Call(128, 128, "bfloat16", 256, 64, 0)).streamed
  assert choose(config.Call(128, 128, "bfloat16", 256, 1024, 0)).streamed
  monkeypatch.setattr(config, "config", streamed)
  got = _interpreted(CASES["carried"], detect_races=True)
  assert_close(got, _expected(CASES["carried"]))
  assert "RACE" not in capsys.readouterr().out


def test_numerical_gradients():
  case = Case(40, 16, decays=True, state=True)
  arrays, _ = _arrays(case)
  arrays["log_decay"] = jnp.maximum(arrays["log_decay"], -1.0)

  @jax.jit
  def run(arrays):
    return cached_linear_attention(
      **arrays, segment_length=case.length, implementation="mosaic_tpu"
    )

  with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
    check_grads(run, (arrays,), 1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.fixture
def simulated_gpu(monkeypatch):
  """Where the kernels for GPUs run without one; loads find nan by default."""
  for name, function in (("triton", "fwd"), ("triton_vjp", "bwd")):
    module = importlib.import_module(f"{KERNELS}.{name}")
    run = functools.partial(getattr(module, function), interpret=True)
    monkeypatch.setattr(module, function, run)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("name", GPU_CASES)
def test_the_gpu_kernels_equal_the_definition(name):
  case = GPU_CASES[name]
  assert_close(_run(case, "triton"), _expected(case))


def _dot(dot, a, b, *args, **options):
  return dot(a.astype(jnp.float32), b.astype(jnp.float32), *args, **options)


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("implementation", ["mosaic_tpu", "triton"])
def test_bfloat16(monkeypatch, implementation):
  # XLA has no product of bfloat16 for a CPU: here it is one of float32, which
  # is exact for what bfloat16 can hold.
  for name in (implementation, f"{implementation}_vjp"):
    kernel = importlib.import_module(f"{KERNELS}.{name}")
    monkeypatch.setattr(kernel, "dot", functools.partial(_dot, kernel.dot))
  case = CASES["decay"]._replace(dtype=jnp.bfloat16)
  if implementation == "mosaic_tpu":
    grads, outputs = _interpreted(case)
  else:
    grads, outputs = _run(case, implementation)
  assert outputs[0].dtype == grads["q"].dtype == jnp.bfloat16
  assert outputs[1].dtype == jnp.float32
  exact_grads, exact = _expected(case)
  assert_close(outputs, exact, 1e-2)
  assert_close(grads, exact_grads, 2e-2)


def _lowered(case: Case, implementation, platform):
  arrays, _ = _arrays(case)

  def loss(arrays):
    y, ends = cached_linear_attention(
      **arrays, segment_length=case.length, implementation=implementation
    )
    return jnp.sum(y.astype(jnp.float32)) + jnp.sum(ends)

  traced = jax.jit(jax.grad(loss)).trace(arrays)
  return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
  ("implementation", "platform", "kernels"),
  [
    (None, "tpu", ("fwd", "bwd")),
    ("triton", "cuda", ("write", "read", "read_vjp", "write_k_vjp")),
    (None, "cuda", ()),
    ("xla", "tpu", ()),
    ("xla", "cuda", ()),
    (None, "cpu", ()),
  ],
)
def test_the_platform_decides_when_nobody_does(
  implementation, platform, kernels
):
  text = _lowered(CASES["plain"], implementation, platform)
  for name in kernels:
    kernel = f'name = "memcache_cached_linear_attention_{name}"'
    assert text.count(kernel) == 1
  assert kernels or "memcache_cached_linear_attention" not in text


def test_none_takes_the_xla_form_where_the_kernel_cannot():
  text = _lowered(Case(64, 20), None, "tpu")
  assert "memcache_cached_linear_attention" not in text


TPU, GPU = "mosaic_tpu", "triton"


@pytest.mark.parametrize(
  ("implementation", "case", "reason"),
  [
    (TPU, Case(40, 20), "multiple of 16 up to 512: got 20"),
    (TPU, Case(32, 16, value=512), "value width .* up to 256: got 512"),
    (TPU, Case(32, 16, dtype=jnp.float16), "got float16"),
    (TPU, Case(2**20, 16), "gates of its 65536 states must fit into fast"),
    (GPU, Case(32, 8), "at least 16 tokens: got 8"),
  ],
)
def test_the_kernel_says_what_it_cannot(implementation, case, reason):
  b, t, n, k, v = case.rows, case.tokens, case.heads, case.key, case.value
  array = lambda *shape: jax.ShapeDtypeStruct(shape, case.dtype)
  arrays = {
    "q": array(b, t, n, k),
    "k": array(b, t, n, k),
    "v": array(b, t, n, v),
    "weights": array(b, t, n, case.segments),
    "own_weight": array(b, t, n),
  }
  run = functools.partial(
    cached_linear_attention,
    segment_length=case.length,
    implementation=implementation,
  )
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(lambda arrays: run(**arrays), arrays)


def test_second_derivatives():
  case = Case(20, 16)
  arrays, _ = _arrays(case)

  def second(implementation):
    def loss(q):
      y, _ = cached_linear_attention(
        **{**arrays, "q": q},
        segment_length=case.length,
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(y))

    gradient = lambda q: jnp.sum(jax.grad(loss)(q) ** 2)
    return jax.eval_shape(jax.grad(gradient), arrays["q"])

  assert second("xla").shape == arrays["q"].shape
  with pytest.raises(NotImplementedError, match="first derivatives only"):
    second(None)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"weights": jnp.ones((1, 20, 1, 3))}, "`weights` must have axes"),
    ({"fresh": jnp.zeros((1, 3), bool)}, "`fresh` must have axes"),
    ({"write_mode": "both"}, "`write_mode` must be one of"),
    ({"segment_length": 0}, "`segment_length` must be an int"),
    ({"implementation": "cuda"}, "`implementation` must be None or one of"),
  ],
)
def test_clear_errors(change, message):
  arrays, _ = _arrays(Case(20, 16))
  with pytest.raises(ValueError, match=message):
    cached_linear_attention(**{**arrays, "segment_length": 16, **change})


def test_no_tokens():
  arrays, _ = _arrays(Case(16, 16))
  arrays = {name: x[:, :0] for name, x in arrays.items()}
  arrays["weights"] = arrays["weights"][..., :0]
  y, ends = cached_linear_attention(**arrays, segment_length=16)
  assert y.shape == (1, 0, 1, 32)
  assert ends.shape == (1, 0, 1, 32, 32)
