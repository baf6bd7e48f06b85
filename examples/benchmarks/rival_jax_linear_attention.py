"""Times jax-linear-attention's ops, in its environment.

The same functions as our bare layers without a cache, on the same weights:
plain linear attention (gates of 1, scores not scaled) and Gated DeltaNet.
"""

import argparse
import functools
import importlib.metadata
import time

from examples.benchmarks import cases, measure


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  case, arguments = cases.parse(parser, "jax-linear-attention")
  measure.use_one_core(arguments.core)
  import jax
  import jax.numpy as jnp
  from jla import ops  # pyright: ignore[reportMissingImports]

  is_delta = case.memory == "gated_delta"
  gates = ("log_decay", "beta") if is_delta else ()
  names = ("q", "k", "v", *gates, "o")
  keys = jax.random.split(jax.random.key(0), len(names))
  params = {
    name: jax.random.normal(
      key, (cases.DIM, cases.HEADS if name in gates else cases.DIM)
    )
    * cases.DIM**-0.5
    for name, key in zip(names, keys, strict=True)
  }
  shape = (cases.BATCH, case.tokens, cases.DIM)
  x = jax.random.normal(jax.random.key(9), shape)

  def forward(params, x):
    q, k, v = (
      (x @ params[name]).reshape(*x.shape[:2], cases.HEADS, -1)
      for name in "qkv"
    )
    op, options = "simple_gla", {"g": jnp.zeros(q.shape[:3])}
    if is_delta:
      op, options = (
        "gated_deltanet",
        {
          "g": jax.nn.log_sigmoid(x @ params["log_decay"] + cases.LONG),
          "beta": jax.nn.sigmoid(x @ params["beta"]),
          "use_qk_l2norm": True,
        },
      )
    y, _ = ops.linear_attention(
      op, q, k, v, scale=1.0, impl="chunked", chunk_size=64, **options
    )
    return y.reshape(x.shape) @ params["o"]

  def loss(params, x):
    return jnp.mean(jnp.square(forward(params, x)))

  measure.warm_up_jax()
  functions = {"forward_backward": jax.grad(loss), "forward": forward}
  calls, compile_s = {}, {}
  for mode, function in functions.items():
    start = time.perf_counter()
    program = jax.jit(function).lower(params, x).compile()
    compile_s[mode] = time.perf_counter() - start
    calls[mode] = functools.partial(_wait_for, program, params, x)
  labels = {
    **vars(case),
    "version": importlib.metadata.version("jax-linear-attention"),
    "backend": f"jax {jax.__version__}",
  }
  measure.time_rival(labels, calls, compile_s)


def _wait_for(program, *inputs):
  import jax

  return jax.block_until_ready(program(*inputs))


if __name__ == "__main__":
  main()
