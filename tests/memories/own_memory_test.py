"""A memory of one's own that does not fit together is named, and how."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import pytest

from memcache_jax.caching import Cached, Constant
from memcache_jax.memories import HeadShape, Memory
from memcache_jax.testing import assert_close, random_tokens

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


@jax.tree_util.register_pytree_node_class
class Held:
  """A state without `__eq__`, which only takes arrays."""

  def __init__(self, sums):
    if isinstance(sums, str):
      raise TypeError("A state holds no text.")
    self.sums = sums

  def tree_flatten(self):
    return (self.sums,), None

  @classmethod
  def tree_unflatten(cls, _, leaves):
    return cls(*leaves)


class HoldingSums(Sums):
  """`Sums`, with its matrix in a class of its own."""

  def init_state(self, params, shape, batch, *, max_length=None):
    return Held(super().init_state(params, shape, batch))

  def step(self, params, state, k, v, gates):
    return Held(super().step(params, state.sums, k, v, gates))

  def snapshot(self, state):
    return state.sums


class Pair(NamedTuple):
  sums: Any
  count: Any


class PairThenTuple(Sums):
  """A state that `step` returns as a tuple of the same leaves."""

  def init_state(self, params, shape, batch, *, max_length=None):
    sums = super().init_state(params, shape, batch)
    return Pair(sums, jnp.zeros((batch,), jnp.int32))

  def step(self, params, state, k, v, gates):
    return (super().step(params, state[0], k, v, gates), state[1] + 1)


BROKEN = {
  "step_of_nothing": (
    _broken("step", lambda self, params, state, k, v, gates: None),
    "`step` of Broken must return a state like that of `init_state`, .*None",
  ),
  "step_of_another_dtype": (
    _broken("step", lambda self, p, state, k, v, gates: state.astype("int32")),
    "`step` of Broken must .*int32",
  ),
  "step_of_a_tuple": (
    PairThenTuple(),
    r"`step` of PairThenTuple must .*Pair.*: got PyTreeDef\(\(",
  ),
  "step_of_another_class": (
    type(
      "Broken",
      (HoldingSums,),
      {"step": lambda self, params, state, k, v, gates: state.sums},
    )(),
    "`step` of Broken must return .*Held.*: got ",
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


def test_a_state_of_a_class_without_equality():
  tokens = random_tokens(Sums(), SHAPE, 3, 5)
  y, state = HoldingSums().scan({}, None, tokens)
  want, sums = Sums().scan({}, None, tokens)
  assert isinstance(state, Held)
  chex.assert_trees_all_equal((y, state.sums), (want, sums))
  chex.assert_trees_all_equal(
    HoldingSums().scan({}, state, tokens)[0], Sums().scan({}, sums, tokens)[0]
  )


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


class Growing(Sums):
  """Keeps a matrix for every token, the newest first."""

  def init_state(self, params, shape, batch, *, max_length=None):
    return jnp.zeros((batch, max_length, *shape))

  def step(self, params, state, k, v, gates):
    new = jnp.einsum("bnk,bnv->bnkv", k, v)
    return jnp.concatenate([new[:, None], state[:, :-1]], axis=1)

  def snapshot(self, state):
    return jnp.sum(state, axis=1)


def test_a_state_may_be_as_long_as_it_grows():
  memory = Growing()
  for length in (1, 7):
    state = memory.init_state({}, SHAPE, 2, max_length=length)
    memory.check_state({}, state, SHAPE, 2)
  with pytest.raises(ValueError, match=r"of shape \(2, any, 2, 4, 3\): got"):
    memory.check_state({}, state[..., :2], SHAPE, 2)


def test_a_growing_state_has_room_for_one_call_of_the_default_scan(as_a_user):
  memory, tokens = Growing(), random_tokens(Sums(), SHAPE, 3, 5)
  y, _ = memory.scan({}, None, tokens)
  assert_close(y, Sums().scan({}, None, tokens)[0])
  state = memory.init_state({}, SHAPE, 3, max_length=7)
  with pytest.raises(
    ValueError,
    match=r"`state` must .*`init_state` of Growing .*\[3, 5, 2, 4, 3\].*: "
    r"got .*\[3, 7, 2, 4, 3\].*must override `scan`",
  ):
    memory.scan({}, state, tokens)
  with pytest.raises(ValueError, match="`state` must .* Sums .*int32"):
    Sums().scan({}, jnp.zeros((3, *SHAPE), jnp.int32), tokens)
