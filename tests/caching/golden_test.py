"""Every golden case: values and gradients against float64 numbers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax import document_starts, memories
from memcache_jax.caching import (
  Cached,
  Constant,
  GatedResidual,
  Logarithmic,
  MemorySoup,
  MovingAverage,
  Residual,
  SparseSelective,
)
from memcache_jax.memories import HeadShape, Optimizer, Retention, Tokens
from memcache_jax.ops.mlp_memory import MLP
from memcache_jax.testing import stream
from tests import golden

CASES = tuple(golden.cases())
SEGMENTS = {"constant": Constant, "logarithmic": Logarithmic}
ARCHITECTURES = {
  "matrix": MLP.matrix(),
  "mlp2": MLP(norm=False),
  "mlp2_ln": MLP(),
  "ttt_linear": MLP.ttt_linear(),
  "ttt_mlp": MLP.ttt_mlp(),
}
MATRIX_MEMORIES = ("linear", "decayed_linear", "swla")


def _base_memory(case):
  config, name = case.config, case.config["memory"]
  initial = "learned" if config["initial_memory"] == "given" else "zero"
  match name:
    case "linear":
      return memories.Linear(chunk_size=16)
    case "decayed_linear":
      return memories.DecayedLinear(write="sigmoid")
    case "swla":
      return memories.SlidingWindowLinear(config["window"], chunk_size=16)
    case "deltanet":
      return memories.Delta(initial=initial, chunk_size=16)
    case "gated_deltanet":
      return memories.GatedDelta(initial=initial, chunk_size=16)
    case "rwkv7":
      return memories.RWKV7(initial=initial)
  options = {
    "architecture": ARCHITECTURES[config["architecture"]],
    "inner_batch": config["inner_batch"],
  }
  pairs = Optimizer(restart="pairs")
  match name:
    case "dla":
      decay = Retention(decay="decay" in case.inputs)
      return memories.DeepLinear(retention=decay, **options)
    case "deep_swla":
      return memories.DeepSlidingWindow(window=config["window"], **options)
    case "titans":
      return memories.Titans(**options)
    case "omega":
      return memories.Omega(window=config["window"], **options)
    case "yaad":
      return memories.Yaad(**options)
    case "moneta":
      return memories.Moneta(**options)
    case "ttt_linear":
      return memories.TTTLinear(optimizer=pairs, **options)
    case "ttt_mlp":
      return memories.TTTMLP(optimizer=pairs, **options)
  raise AssertionError(f"no memory for {name}")


def _aggregate(case):
  config = case.config
  gate = {"gate": config["gate"], "pooling": config.get("pool", "mean")}
  if gate["gate"] == "input":
    gate["max_segments"] = case.inputs["gate_logits"].shape[-1]
  match config["aggregation"]:
    case "residual":
      return Residual()
    case "average":
      return MovingAverage()
    case "grm":
      return GatedResidual(**gate)
    case "soup":
      return MemorySoup(**gate)
    case "ssc":
      return SparseSelective(config["top_k"], **gate)
  raise AssertionError(f"no aggregator for {config['aggregation']}")


def _memory(case):
  config = case.config
  if config["aggregation"] == "none":
    return _base_memory(case)
  return Cached(
    _base_memory(case),
    SEGMENTS[config["segmentation"]](config["segment_length"]),
    _aggregate(case),
    config["write_mode"],
  )


# Where a gate of ours has another name in the files.
NAMES = {"slot_logits": "gate_logits", "beta": "write"}


def _gates(memory, inputs):
  gates = {}
  for name in memory.gates():
    if name == "log_decay":
      gates[name] = jnp.log(inputs["decay"])
    elif name in ("write", "step") and "window_weights" in inputs:
      gates[name] = inputs["window_weights"]
    else:
      gates[name] = inputs[NAMES.get(name, name)]
  return gates


def _tokens(memory, inputs):
  mask = inputs.get("mask")
  starts = None
  if "segment_ids" in inputs:
    starts = document_starts(inputs["segment_ids"], mask)
  return Tokens(
    inputs["q"],
    inputs["k"],
    inputs["v"],
    _gates(memory, inputs),
    mask,
    starts,
    max_unaligned_starts=8,
  )


def _params(inputs):
  prefix = "param."
  return {
    name.removeprefix(prefix): x
    for name, x in inputs.items()
    if name.startswith(prefix)
  }


def _to_jax(x):
  if np.issubdtype(x.dtype, np.floating):
    return jnp.asarray(x, jnp.float32)
  return jnp.asarray(x)


def _tier(case):
  """Networks that are cached take long to compile: those are slow."""
  quick = (
    "inner_batch" not in case.config or case.config["aggregation"] == "none"
  )
  return pytest.param(case, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
  "case", [_tier(case) for case in CASES], ids=lambda case: case.name
)
def test_values_and_gradients(case):
  memory = _memory(case)
  inputs = jax.tree.map(_to_jax, case.inputs)
  floats = {
    name: x
    for name, x in inputs.items()
    if jnp.issubdtype(x.dtype, jnp.floating)
  }
  weights = floats.pop("out_weights")
  if case.config["memory"] in MATRIX_MEMORIES:
    floats.pop("param.w", None)  # their initial memory is zero, not learned
  if "mask" in inputs:
    # Large where masked, but log of a decay above 1 is no decay at all.
    decay = floats.get("decay")
    if decay is not None:
      keep = inputs["mask"].reshape(*inputs["mask"].shape, 1)
      floats["decay"] = jnp.where(keep, decay, 1.0)

  def loss(floats):
    tokens = _tokens(memory, {**inputs, **floats})
    y, state = memory.scan(_params(floats), None, tokens)
    return jnp.sum(y * weights), (y, state)

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, (y, state)), grads = run(floats)
  chex.assert_tree_all_finite((y, state, grads))
  assert golden.error(y, case.outputs["y"]) < 2e-5
  zero_start = case.config["initial_memory"] == "zero"
  for name, grad in grads.items():
    if zero_start and name.startswith("param."):
      continue  # their memory is a constant
    assert golden.error(grad, case.gradients[name]) < 1e-4, name
  _check_state(case, state)


def _check_state(case, state):
  """What is cached, for the memories whose snapshot is one matrix."""
  if case.config["aggregation"] == "none":
    if case.config["memory"] in MATRIX_MEMORIES:
      assert golden.error(state.matrix, case.outputs["final.w"]) < 2e-5
    return
  counts = case.outputs["num_cached"]
  np.testing.assert_array_equal(np.sum(state.index >= 0, axis=1), counts)
  for row, count in enumerate(counts):
    if case.config["memory"] in (*MATRIX_MEMORIES, "deltanet", "rwkv7"):
      cached = case.outputs["cache.w"][row, :count]
      assert golden.error(state.memories[row, :count], cached) < 2e-5
    if case.config["aggregation"] in ("grm", "soup", "ssc"):
      if case.config["gate"] in ("context", "shared"):
        keys = case.outputs["cache.pooled_keys"][row, :count]
        assert golden.error(state.keys[row, :count], keys) < 2e-5


@pytest.mark.parametrize(
  "case",
  [
    case
    for case in CASES
    if case.config.get("segmentation") == "constant"
    and case.config["memory"] in MATRIX_MEMORIES
    and not case.config["documents"]
    and not case.config["masked"]
  ],
  ids=lambda case: case.name,
)
def test_gates(case):
  memory = _memory(case)
  inputs = jax.tree.map(_to_jax, case.inputs)
  inspect = jax.jit(lambda x: memory.inspect({}, None, _tokens(memory, x)))
  _, _, weights = inspect(inputs)
  gamma = case.outputs["gamma"]
  expected = np.zeros(weights.shape)
  segment = np.arange(gamma.shape[1]) // case.config["segment_length"]
  for t, s in enumerate(segment):
    expected[:, t, :, :s] = gamma[:, t, :, :s]
    expected[:, t, :, -1] = gamma[:, t, :, s]
  assert golden.error(weights, expected) < 2e-5


def test_streamed_token_by_token():
  """The same numbers when every token is a call of its own."""
  (case,) = golden.cases("linear_ssc_ind_C5_k2_T40")
  memory = _memory(case)
  inputs = jax.tree.map(_to_jax, case.inputs)
  tokens = _tokens(memory, inputs)
  b, t, n, k = tokens.q.shape
  shape = HeadShape(n, k, tokens.v.shape[-1])
  state = memory.init_state({}, shape, b, max_length=t)
  step = jax.jit(lambda state, tokens: memory.scan({}, state, tokens))
  y, _ = stream(step, state, tokens, [1])
  assert golden.error(y, case.outputs["y"]) < 2e-5
