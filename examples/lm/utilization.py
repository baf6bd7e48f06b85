"""How much of what the devices can do a run makes use of."""

import jax

# Products of bfloat16 numbers with a dense result, flops a second of one
# device, by what it calls itself; makers' data sheets.
PEAKS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H200": 989e12,
}


def peak(devices: list[jax.Device]) -> float | None:
  """Flops a second of all of them together; None where it is not known."""
  peaks = [PEAKS.get(device.device_kind) for device in devices]
  known = [value for value in peaks if value is not None]
  return sum(known) if len(known) == len(peaks) else None


def model_flops(parameters: int, tokens: float) -> float:
  """Of a step: six for each parameter and token.

  PaLM (arXiv 2204.02311), appendix B, without what attention and memories
  multiply besides their parameters.
  """
  return 6.0 * parameters * tokens
