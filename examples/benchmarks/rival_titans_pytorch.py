"""Times titans-pytorch's NeuralMemory; runs in the rivals' environment.

Another memory (an MLP per head, trained as it reads along) without caching:
it shows what a popular package costs at these sizes.
"""

import argparse
import importlib.metadata

from examples.benchmarks import cases, measure


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  case, arguments = cases.parse(parser, "titans-pytorch")
  measure.use_one_core(arguments.core)
  import torch  # pyright: ignore[reportMissingImports]
  from titans_pytorch import (  # pyright: ignore[reportMissingImports]
    NeuralMemory,
  )

  torch.set_num_threads(1)
  torch.manual_seed(0)
  layer = NeuralMemory(
    dim=cases.DIM,
    chunk_size=case.inner_batch,
    dim_head=cases.DIM // cases.HEADS,
    heads=cases.HEADS,
    default_model_kwargs={"depth": 2, "expansion_factor": 2.0},
  )
  x = torch.randn(cases.BATCH, case.tokens, cases.DIM)

  def forward(x=x):
    with torch.no_grad():
      return layer(x)[0]

  def forward_backward(x=x):
    layer.zero_grad(set_to_none=True)
    layer(x)[0].square().mean().backward()

  # What PyTorch loads at its first operations must not count.
  forward_backward(x[:, : 2 * case.inner_batch])
  labels = {
    **vars(case),
    "version": importlib.metadata.version("titans-pytorch"),
    "backend": f"torch {torch.__version__}",
  }
  calls = {"forward_backward": forward_backward, "forward": forward}
  measure.time_rival(labels, calls)


if __name__ == "__main__":
  main()
