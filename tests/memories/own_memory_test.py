"""A memory of one's own that does not fit together is named, and how."""

from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from memcache_jax.caching import Cached, Constant
from memcache_jax.memories import HeadShape, Memory
from memcache_jax.testing import random_tokens

SHAPE = HeadShape(2, 4, 3)


@dataclass(frozen=True)
class Sums(Memory):
  """Adds up outer products; the tests break one of its methods at a time."""

  def init_state(self, params, shape, batch, *, max_length=None):
    n, k, v = shape
    return jnp.zeros((batch, n, k, v))

  def step(self, params, state, k, v, gates):
    return state + jnp.einsum("bnk,bnv->bnkv", k, v)

  def read(self, params, memory, q):
    return jnp.einsum("btnk,bnkv->btnv", q, memory)


def _broken(method, function):
  return type("Broken", (Sums,), {method: function})()


BROKEN = {
  "step_of_nothing": (
    _broken("step", lambda self, params, state, k, v, gates: None),
    "`step` of Broken must return a state like that of `init_state`, .*None",
  ),
  "step_of_another_dtype": (
    _broken("step", lambda self, p, state, k, v, gates: state.astype("int32")),
    "`step` of Broken must .*int32",
  ),
  "state_in_bfloat16": (
    _broken(
      "init_state",
      lambda self, params, shape, batch, max_length=None: jnp.zeros(
        (batch, *shape), jnp.bfloat16
      ),
    ),
    "`init_state` of Broken must return leaves in float32 .*got bfloat16",
  ),
  "state_without_rows": (
    _broken(
      "init_state",
      lambda self, params, shape, batch, max_length=None: jnp.zeros(shape),
    ),
    "`init_state` of Broken must .* with 3 rows first",
  ),
  "read_of_a_mean": (
    _broken("read", lambda self, params, memory, q: jnp.mean(q)),
    r"`read` of Broken must return an array of shape \(3, 1, 2, 3\)",
  ),
  "gates_of_a_name": (
    _broken("gates", lambda self: "write"),
    "`gates` must map names to Gate: got 'write'",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_named(name, as_a_user):
  memory, message = BROKEN[name]
  tokens = random_tokens(Sums(), SHAPE, 3, 5)
  with pytest.raises(ValueError, match=message):
    memory.scan({}, None, tokens)


def test_a_missing_method_is_named(as_a_user):
  class Empty(Memory):
    pass

  with pytest.raises(
    NotImplementedError, match="Empty must define `init_state"
  ):
    Empty().init_state({}, SHAPE, 2)
  with pytest.raises(NotImplementedError, match="Empty must define `step`"):
    Empty().step({}, None, None, None, {})
  with pytest.raises(NotImplementedError, match="Empty must define `read`"):
    Empty().read({}, None, None)


def test_a_state_of_other_heads_is_refused(as_a_user):
  memory = Sums()
  state = memory.init_state({}, HeadShape(3, 4, 3), 2)
  with pytest.raises(ValueError, match=r"\(2, 2, 4, 3\): got float32 of shape"):
    memory.check_state({}, state, SHAPE, 2)
  cached = Cached(memory, Constant(4))
  state = cached.init_state({}, HeadShape(3, 4, 3), 2, max_length=20)
  with pytest.raises(ValueError, match=r"`state.online` must be float32 of"):
    cached.check_state({}, state, SHAPE, 2)


def test_a_state_may_be_as_long_as_it_grows():
  class Growing(Sums):
    def init_state(self, params, shape, batch, *, max_length=None):
      return jnp.zeros((batch, max_length, *shape))

  memory = Growing()
  for length in (1, 7):
    state = memory.init_state({}, SHAPE, 2, max_length=length)
    memory.check_state({}, state, SHAPE, 2)
  with pytest.raises(ValueError, match=r"of shape \(2, any, 2, 4, 3\): got"):
    memory.check_state({}, state[..., :2], SHAPE, 2)
