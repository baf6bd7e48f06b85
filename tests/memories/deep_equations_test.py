"""Deep memories without reference numbers, token by token in NumPy.

In float64, from the equations; only the gradient of a plain network comes
from JAX.
"""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcache_jax.memories import Atlas, HeadShape, LaCT, Memora
from memcache_jax.ops.mlp_memory import MLP
from memcache_jax.testing import assert_close, random_tokens

SHAPE = HeadShape(1, 4, 4)


def _softmax(x):
  x = np.exp(x - np.max(x))
  return x / np.sum(x)


def _newton_schulz(x):
  x, flip = x / np.linalg.norm(x), x.shape[0] > x.shape[1]
  x = x.T if flip else x
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  return x.T if flip else x


def _norm(z):
  z = z - jnp.mean(z)
  return z / jnp.sqrt(jnp.mean(z * z) + 1e-6)


def memora_network(w, x):
  return x + _norm(x @ w["w"])


def atlas_network(w, x):
  return _norm(x @ w["w"])


def lact_network(w, x):
  return (jax.nn.silu(x @ w["w_gate"]) * (x @ w["w_up"])) @ w["w_down"]


def _gradients(network, loss):
  gradient = jax.jit(
    jax.grad(lambda w, k, v: loss(network(w, k), v).astype(jnp.float32))
  )

  def at(w, k, v):
    w = {name: jnp.asarray(x, jnp.float32) for name, x in w.items()}
    return {
      name: np.asarray(x, np.float64)
      for name, x in gradient(w, jnp.asarray(k), jnp.asarray(v)).items()
    }

  return at


def _half_square(y, v):
  return 0.5 * jnp.sum((y - v) ** 2)


def memora(memory, w, x):
  """W <- c softmax(a log W - eta grad), exact at the end of a batch."""
  gradient, reads = _gradients(memora_network, _half_square), []
  c = {name: m.size / np.sqrt(m.shape[0]) for name, m in w.items()}
  w = {name: c[name] * _softmax(m) for name, m in w.items()}
  for t in range(len(x["q"])):
    if t % memory.inner_batch == 0:
      start, now = w, w
      log = {name: np.log(m) for name, m in w.items()}
    a, eta = np.exp(x["log_decay"][t]), x["step"][t]
    g = gradient(start, x["k"][t], x["v"][t])
    log = {name: a * log[name] - eta * g[name] for name in w}
    now = {name: a * now[name] - eta * g[name] for name in w}
    reads.append(memora_network(_f32(now), _f32(x["q"][t])))
    if (t + 1) % memory.inner_batch == 0:
      w = {name: c[name] * _softmax(m) for name, m in log.items()}
  return np.stack(reads), w


def atlas(memory, w, x):
  """S <- mu S - sum over the window, W <- a W + step NS(S) once per batch."""
  gradient, reads = _gradients(atlas_network, _half_square), []
  features = lambda z: np.concatenate([z, z**2 / 2])
  momentum = {name: np.zeros_like(m) for name, m in w.items()}
  for t in range(len(x["q"])):
    if t % memory.inner_batch == 0:
      start = w
    for name in momentum:
      momentum[name] = x["momentum"][t] * momentum[name]
    for o in range(min(memory.window, t + 1)):
      g = gradient(start, features(x["k"][t - o]), x["v"][t - o])
      for name in momentum:
        momentum[name] = momentum[name] - x["step"][t, o] * g[name]
    w = {name: np.exp(x["log_decay"][t]) * m for name, m in w.items()}
    reads.append(atlas_network(_f32(w), _f32(features(x["q"][t]))))
    if (t + 1) % memory.inner_batch == 0:
      step = memory.optimizer.muon.step
      w = {n: m + step * _newton_schulz(momentum[n]) for n, m in w.items()}
  return np.stack(reads), start


def lact(memory, w, x):
  """W <- W - NS(sum of gradients), every column keeping its first norm."""
  gradient, reads = _gradients(lact_network, lambda y, v: -jnp.sum(y * v)), []
  norm = lambda m: np.linalg.norm(m, axis=0, keepdims=True)
  first = w
  for t in range(len(x["q"])):
    if t % memory.inner_batch == 0:
      total = {name: np.zeros_like(m) for name, m in w.items()}
    g = gradient(w, x["k"][t], x["v"][t])
    total = {n: m + x["step"][t] * g[n] for n, m in total.items()}
    reads.append(lact_network(_f32(w), _f32(x["q"][t])))
    if (t + 1) % memory.inner_batch == 0:
      w = {n: m - _newton_schulz(total[n]) for n, m in w.items()}
      w = {n: m * norm(first[n]) / norm(m) for n, m in w.items()}
  return np.stack(reads), w


def _f32(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


@pytest.mark.parametrize(
  ("memory", "definition"),
  [
    (Memora(MLP(depth=1), inner_batch=3, init_std=1.0), memora),
    (Atlas(MLP(depth=1, residual=False), inner_batch=3), atlas),
    (LaCT(inner_batch=3), lact),
  ],
  ids=["memora", "atlas", "lact"],
)
def test_equations_token_by_token(memory, definition):
  """Two inner batches and a token that reads what the second one left."""
  params = memory.init_params(jax.random.key(0), SHAPE)
  tokens = random_tokens(memory, SHAPE, 1, 7)
  tokens = replace(tokens, mask=None, starts=None)

  def loss(params, floats):
    q, k, v, gates = floats
    tokens_ = replace(tokens, q=q, k=k, v=v, gates=gates)
    y, state = memory.scan(params, None, tokens_)
    return jnp.sum(jnp.sin(y)), (y, state)

  floats = (tokens.q, tokens.k, tokens.v, dict(tokens.gates))
  gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  grads, (y, state) = gradient(params, floats)
  chex.assert_tree_all_finite(grads)
  head = lambda a: np.asarray(a[0, :, 0], np.float64)
  x = {"q": head(tokens.q), "k": head(tokens.k), "v": head(tokens.v)}
  x |= {name: head(a) for name, a in tokens.gates.items()}
  weights = {
    name: np.asarray(w[0], np.float64)
    for name, w in params.items()
    if name.startswith("w")
  }
  want, last = definition(memory, weights, x)
  assert_close(y[0, :, 0], want, 1e-4)
  assert_close({n: w[0, 0] for n, w in state.start.items()}, last, 1e-4)
