import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from memcache_jax.layers import ShortConv

FEATURES = (2, 3)


def slow(kernel, x, mask, starts):
  """The definition, token by token."""
  y, last = np.zeros_like(x), None
  for row in range(x.shape[0]):
    document = []
    for t in range(x.shape[1]):
      if not mask[row, t]:
        continue
      document = [] if starts[row, t] else document
      document.append(x[row, t])
      for offset, past in enumerate(reversed(document[-len(kernel) :])):
        y[row, t] += kernel[offset] * past
    tail = len(kernel) - 1
    padded = [np.zeros(x.shape[2:])] * tail + document
    row_last = np.stack(padded[len(padded) - tail :]) if tail else None
    last = [row_last] if last is None else [*last, row_last]
  return y, np.stack(last) if tail else np.zeros((x.shape[0], 0, *x.shape[2:]))


@jax.jit
def run(conv, x, state, mask, starts):
  return conv(x, state, mask=mask, starts=starts)


@pytest.mark.parametrize("width", [1, 4])
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
  lengths=st.lists(st.sampled_from([1, 2, 6]), min_size=1, max_size=5),
  seed=st.integers(0, 999),
)
def test_is_the_definition_for_any_split(width, lengths, seed):
  rng = np.random.default_rng(seed)
  t = sum(lengths)
  conv = ShortConv(FEATURES, width, rngs=nnx.Rngs(seed))
  x = rng.normal(size=(2, t, *FEATURES)).astype(np.float32)
  mask, starts = rng.random((2, t)) < 0.6, rng.random((2, t)) < 0.3
  expected = slow(np.asarray(conv.kernel[...]), x, mask, starts)
  state, ys, begin = conv.init_state(2), [], 0
  for length in lengths:
    piece = slice(begin, begin + length)
    y, state = run(conv, x[:, piece], state, mask[:, piece], starts[:, piece])
    ys.append(y)
    begin += length
  got = np.concatenate(ys, axis=1), state
  chex.assert_trees_all_close(got, expected, atol=1e-5)
  fresh = run(conv, x[:, : lengths[0]], None, mask[:, : lengths[0]], None)
  no_starts = slow(
    np.asarray(conv.kernel[...]),
    x[:, : lengths[0]],
    mask[:, : lengths[0]],
    np.zeros_like(starts),
  )
  chex.assert_trees_all_close(fresh, no_starts, atol=1e-5)


def test_without_flags_nothing_is_gathered():
  conv = ShortConv(FEATURES, rngs=nnx.Rngs(0))
  x = jnp.ones((2, 9, *FEATURES))
  text = jax.jit(lambda x: conv(x)).lower(x).as_text()
  assert not any(word in text for word in ("gather", "sort", "scatter"))
  chex.assert_trees_all_close(
    conv(x),
    run(conv, x, None, jnp.ones((2, 9), bool), jnp.zeros((2, 9), bool)),
    atol=1e-6,
  )


def test_errors():
  conv = ShortConv(FEATURES, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match=r"`x` .*\(2, 3\): got .*\(1, 5, 2, 4\)"):
    conv(jnp.ones((1, 5, 2, 4)))
  with pytest.raises(ValueError, match=r"`state` .*\(1, 3, 2, 3\)"):
    conv(jnp.ones((1, 5, 2, 3)), jnp.ones((1, 2, 2, 3)))
  with pytest.raises(ValueError, match="`width` .* got 0"):
    ShortConv(FEATURES, 0, rngs=nnx.Rngs(0))
