"""Every golden case this version can compute: values and gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax import document_starts
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
from memcache_jax.memories import (
  DecayedLinear,
  HeadShape,
  Linear,
  SlidingWindowLinear,
  Tokens,
)
from tests import golden

MEMORIES = {
  "linear": lambda config: Linear(chunk_size=16),
  "decayed_linear": lambda config: DecayedLinear(write="sigmoid"),
  "swla": lambda config: SlidingWindowLinear(config["window"], chunk_size=16),
}

CASES = [case for case in golden.cases() if case.config["memory"] in MEMORIES]
SEGMENTS = {"constant": Constant, "logarithmic": Logarithmic}


def test_the_cases_are_the_ones_meant():
  assert len(CASES) == 15


def _aggregate(config):
  gate, pool = config["gate"], config.get("pool", "mean")
  match config["aggregation"]:
    case "residual":
      return Residual()
    case "average":
      return MovingAverage()
    case "grm":
      return GatedResidual(gate=gate, pooling=pool)
    case "soup":
      return MemorySoup(gate=gate, pooling=pool)
    case "ssc":
      return SparseSelective(config["top_k"], gate=gate, pooling=pool)


def _memory(config):
  memory = MEMORIES[config["memory"]](config)
  if config["aggregation"] == "none":
    return memory
  return Cached(
    memory,
    SEGMENTS[config["segmentation"]](config["segment_length"]),
    _aggregate(config),
    config["write_mode"],
  )


def _gates(memory, inputs):
  gates = {}
  for name in memory.gates():
    match name:
      case "log_decay":
        gates[name] = jnp.log(inputs["decay"])
      case "write" if "window_weights" in inputs:
        gates[name] = inputs["window_weights"]
      case "slot_logits":
        gates[name] = inputs["gate_logits"]
      case _:
        gates[name] = inputs[name]
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


def _to_jax(x):
  if np.issubdtype(x.dtype, np.floating):
    return jnp.asarray(x, jnp.float32)
  return jnp.asarray(x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case):
  memory = _memory(case.config)
  inputs = jax.tree.map(_to_jax, case.inputs)
  floats = {
    name: x
    for name, x in inputs.items()
    if jnp.issubdtype(x.dtype, jnp.floating) and not name.startswith("param")
  }
  weights = floats.pop("out_weights")

  def loss(floats):
    tokens = _tokens(memory, {**inputs, **floats})
    y, state = memory.scan({}, None, tokens)
    return jnp.sum(y * weights), (y, state)

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, (y, state)), grads = run(floats)
  chex.assert_tree_all_finite((y, state, grads))
  assert golden.error(y, case.outputs["y"]) < 2e-5
  for name, grad in grads.items():
    assert golden.error(grad, case.gradients[name]) < 1e-4, name
  _check_state(case, state)


def _check_state(case, state):
  if case.config["aggregation"] == "none":
    assert golden.error(state.matrix, case.outputs["final.w"]) < 2e-5
    return
  counts = case.outputs["num_cached"]
  np.testing.assert_array_equal(np.sum(state.index >= 0, axis=1), counts)
  for row, count in enumerate(counts):
    cached = case.outputs["cache.w"][row, :count]
    assert golden.error(state.memories[row, :count], cached) < 2e-5
    if case.config["aggregation"] in ("grm", "soup", "ssc"):
      keys = case.outputs["cache.pooled_keys"][row, :count]
      assert golden.error(state.keys[row, :count], keys) < 2e-5


@pytest.mark.parametrize(
  "case",
  [
    case
    for case in CASES
    if case.config.get("segmentation") == "constant"
    and not case.config["documents"]
    and not case.config["masked"]
  ],
  ids=lambda case: case.name,
)
def test_gates(case):
  memory = _memory(case.config)
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
  memory = _memory(case.config)
  inputs = jax.tree.map(_to_jax, case.inputs)
  tokens = _tokens(memory, inputs)
  b, t, n, k = tokens.q.shape
  shape = HeadShape(n, k, tokens.v.shape[-1])
  state = memory.init_state({}, shape, b, max_length=t)
  step = jax.jit(lambda state, tokens: memory.scan({}, state, tokens))
  outputs = []
  for i in range(t):
    token = jax.tree.map(lambda x, i=i: x[:, i : i + 1], tokens)
    y, state = step(state, token)
    outputs.append(y)
  y = jnp.concatenate(outputs, axis=1)
  assert golden.error(y, case.outputs["y"]) < 2e-5
