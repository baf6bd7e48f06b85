"""Held-out bits per byte, and the proof that streaming is exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from examples.quickstart import model
from examples.quickstart.data import ByteWindows
from examples.quickstart.settings import Settings
from examples.quickstart.training import BITS_PER_NAT
from memcache_jax import models

# The state is carried this far: longer than any window seen in training.
CONTEXT = 1024
# Bytes per call, and texts side by side.
PIECE = 256
ROWS = 16


def stretches(
  text: np.ndarray, at_most: int | None = None
) -> Int[np.ndarray, "s t_plus_1"]:
  """Cuts a text into rows of `CONTEXT` bytes and the one after them.

  Every byte but the first, and a rest at the end, is once not first in a row.

  Args:
    text: uint8.
    at_most: how many rows to take, evenly spread; None for all.
  """
  windows = ByteWindows(text, CONTEXT)
  step = 1 if at_most is None else -(-len(windows) // at_most)
  return np.stack([windows[i] for i in range(0, len(windows), step)])


def bits_per_byte(
  settings: Settings,
  params: nnx.State,
  texts: Int[np.ndarray, "s t_plus_1"],
) -> float:
  """Mean of -log2 p over all bytes of some texts but the first of each.

  Each text starts from an empty state, which is carried to its end from one
  piece to the next.
  """
  length = texts.shape[1] - 1
  total = 0.0
  for first in range(0, len(texts), ROWS):
    rows = texts[first : first + ROWS]
    padded = np.zeros((ROWS, length + 1), np.int32)
    padded[: len(rows)] = rows
    state = _initial_state(settings, params)
    for start in range(0, length, PIECE):
      piece = padded[:, start : start + PIECE + 1]
      bits, state = _score(settings, params, jax.device_put(piece), state)
      total += float(jax.device_get(bits)[: len(rows)].sum())
  return total / (len(texts) * length)


@functools.partial(jax.jit, static_argnames="settings")
def _initial_state(settings: Settings, params: nnx.State):
  return model.with_params(settings, params).init_state(ROWS, CONTEXT)


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="state")
def _score(
  settings: Settings, params: nnx.State, piece: Int[Array, "b t_plus_1"], state
) -> tuple[Float[Array, " b"], tuple]:
  """Bits of each row of a piece, and the state after it."""
  logits, state = model.with_params(settings, params)(piece[:, :-1], state)
  log_p = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(log_p, piece[:, 1:, None], axis=-1)
  return -BITS_PER_NAT * picked[..., 0].sum(axis=1), state


def streaming_error(
  settings: Settings, params: nnx.State, passage: np.ndarray, piece: int
) -> float:
  """Largest difference of a logit: pieces through the state, or all at once.

  Args:
    settings: of the model.
    params: its weights.
    passage: uint8 text, of which whole pieces are used.
    piece: bytes per call; 1 is what generation does.
  """
  tokens = passage[: len(passage) // piece * piece].astype(np.int32)[None]
  parallel, _ = _logits(settings, params, tokens, None)
  state = jax.jit(
    lambda params: model.with_params(settings, params).init_state(
      1, tokens.shape[1]
    )
  )(params)
  worst = 0.0
  for start in range(0, tokens.shape[1], piece):
    part = slice(start, start + piece)
    streamed, state = _logits(settings, params, tokens[:, part], state)
    worst = np.maximum(worst, jnp.abs(streamed - parallel[:, part]).max())
  return float(worst)


@functools.partial(jax.jit, static_argnames="settings")
def _logits(settings: Settings, params: nnx.State, tokens, state):
  return model.with_params(settings, params)(tokens, state)


def memory_norms(
  settings: Settings, params: nnx.State, passage: np.ndarray
) -> dict[int, float]:
  """By layer, the largest norm that its memory has on some bytes."""
  tokens = passage.astype(np.int32)[None]
  reports = jax.device_get(_memory_reports(settings, params, tokens))
  return {layer: float(x.state_norm) for layer, x in reports.items()}


@functools.partial(jax.jit, static_argnames="settings")
def _memory_reports(settings: Settings, params: nnx.State, tokens):
  return models.memory_reports(model.with_params(settings, params), tokens)


def segment_gates(
  settings: Settings, params: nnx.State, passage: np.ndarray
) -> dict[int, np.ndarray]:
  """By layer, how much each byte reads each memory [t n s+1], online last."""
  tokens = passage.astype(np.int32)[None]
  gates = _segment_gates(settings, params, tokens)
  return {layer: np.asarray(weights[0]) for layer, weights in gates.items()}


@functools.partial(jax.jit, static_argnames="settings")
def _segment_gates(settings: Settings, params: nnx.State, tokens):
  return models.segment_gates(model.with_params(settings, params), tokens)
