"""What the delta-rule memories start from, and the options they take.

That they compute what they should is for contract_test.py and the ops' tests.
"""

import chex
import jax
import numpy as np
import pytest

from memcache_jax.memories import RWKV7, Delta, GatedDelta, HeadShape

SHAPE = HeadShape(num_heads=8, key_dim=32, value_dim=24)


@pytest.mark.parametrize("memory_type", [Delta, GatedDelta, RWKV7])
def test_the_initial_memory_is_zero_or_learned(memory_type):
  memory = memory_type()
  assert memory.init_params(jax.random.key(0), SHAPE) == {}
  assert not np.any(memory.init_state({}, SHAPE, 3))

  memory = memory_type(initial="learned")
  params = memory.init_params(jax.random.key(0), SHAPE)
  np.testing.assert_allclose(np.std(params["w"]), 0.02, rtol=0.05)
  state = memory.init_state(params, SHAPE, 3)
  chex.assert_shape(state, (3, *SHAPE))
  chex.assert_trees_all_equal(state[2], params["w"])


def test_the_first_option_is_the_initial_memory():
  for memory_type in (Delta, GatedDelta, RWKV7):
    assert memory_type("learned") == memory_type(initial="learned")


def test_gates_stay_in_their_range():
  assert Delta().gates()["beta"].scale == 1.0
  assert GatedDelta(max_beta=2).gates()["beta"].scale == 2.0
  # The strongest decay of RWKV-7: exp(-exp(-1/2)).
  strongest = np.exp(RWKV7().gates()["log_decay"].scale)
  np.testing.assert_allclose(strongest, 0.545, atol=5e-4)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
  ("memory_type", "option", "message"),
  [
    (Delta, {"max_beta": 2.5}, r"`max_beta` must be .* in \(0, 2\]: got 2.5"),
    (GatedDelta, {"max_beta": 0.0}, r"`max_beta` must be .*: got 0.0"),
    (Delta, {"max_beta": "x"}, "`max_beta` must be a number .*: got 'x'"),
    (RWKV7, {"initial": "random"}, "`initial` must be one of .*: got 'random'"),
    (Delta, {"chunk_size": 0}, "`chunk_size` must be an int .*: got 0"),
  ],
)
def test_wrong_options(memory_type, option, message):
  with pytest.raises(ValueError, match=message):
    memory_type(**option)
