"""Times a case of memory-caching (PyTorch); runs in the rivals' environment.

With --dump it writes what the layer computes instead, for `agreement` to
compare.
"""

import argparse
import importlib.metadata

from examples.benchmarks import cases, measure

# Our names of the write modes, and theirs.
_START = {"independent": "restart", "checkpoint": "checkpoint"}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--dump", help="an .npz file to write instead of timing")
  case, arguments = cases.parse(parser, "memory-caching")
  measure.use_one_core(arguments.core)
  import torch  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(1)
  torch.manual_seed(0)
  layer = _build(case)
  x = torch.randn(cases.BATCH, case.tokens, cases.DIM)
  if arguments.dump:
    _dump(layer, x, arguments.dump)
    return

  def forward(x=x):
    with torch.no_grad():
      return layer(x)

  def forward_backward(x=x):
    layer.zero_grad(set_to_none=True)
    layer(x).square().mean().backward()

  # What PyTorch loads at its first operations must not count.
  forward_backward(x[:, :4])
  labels = {
    **vars(case),
    "version": importlib.metadata.version("memory-caching"),
    "backend": f"torch {torch.__version__}",
  }
  calls = {"forward_backward": forward_backward, "forward": forward}
  measure.time_rival(labels, calls)


def _build(case):
  from memory_caching import (  # pyright: ignore[reportMissingImports]
    DLABackend,
    DLAConfig,
    LinearMemoryBackend,
    MCConfig,
    MemoryCachingLayer,
    TitansBackend,
    TitansConfig,
  )

  # Its defaults: networks of width 64, no gradient through inner gradients.
  dla, titans = DLAConfig(), TitansConfig()
  backend = {
    "linear": LinearMemoryBackend,
    "dla": lambda: DLABackend(dla),
    "titans": lambda: TitansBackend(titans),
  }[case.memory]()
  config = MCConfig(
    d_model=cases.DIM,
    num_heads=cases.HEADS,
    backend=case.memory,
    aggregation=case.aggregate,
    segment_size=case.segment,
    state_init_mode=_START[case.write_mode],
    ssc_top_k=2,
    dla=dla,
    titans=titans,
  )
  return MemoryCachingLayer(config=config, backend=backend)


def _dump(layer, x, path):
  """Inputs, outputs, weights [in, out], and gradients of the weights."""
  import numpy as np

  y = layer(x)
  y.square().mean().backward()
  arrays = {"x": x, "y": y.detach()}
  for name, weight in layer.named_parameters():
    letter = name[0]  # q_proj.weight: q
    arrays[letter] = weight.detach().T
    if weight.grad is not None:
      arrays[f"d{letter}"] = weight.grad.T
  np.savez(path, **{name: array.numpy() for name, array in arrays.items()})


if __name__ == "__main__":
  main()
