"""The two figures of a run."""

import pathlib

import matplotlib

matplotlib.use("agg")  # writes files, needs no screen

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np

from examples.quickstart.checkpoints import History


def loss_curve(
  path: pathlib.Path, history: History, references: dict[str, float]
) -> None:
  """Training loss, held-out probes, and the n-grams as lines to cross."""
  losses = np.array(history.losses)
  steps = np.arange(1, len(losses) + 1)
  figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
  axes.plot(steps, losses, color="0.8", label="training, each step")
  width = max(1, len(losses) // 30)
  smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
  axes.plot(steps[width - 1 :], smooth, color="C0", label=f"mean of {width}")
  if history.probes:
    probe_steps, bits = zip(*history.probes, strict=True)
    axes.plot(probe_steps, bits, "o-", color="C3", label="held out")
  for name, bits in references.items():
    axes.axhline(bits, color="0.4", linestyle=":", linewidth=1)
    axes.annotate(
      name, (steps[-1], bits), ha="right", va="bottom", fontsize="small"
    )
  axes.set(xlabel="step", ylabel="bits per byte", title="Loss")
  axes.set_ylim(bottom=0.9 * min(smooth.min(), *references.values()), top=5.2)
  axes.legend()
  _save(figure, path)


def segment_gates(
  path: pathlib.Path, gates: dict[int, np.ndarray], segment_length: int
) -> None:
  """How much each byte of a passage reads the memory of each segment.

  Args:
    path: of the PNG.
    gates: by layer [t n s+1], cached memories in order, then the online one.
    segment_length: bytes per segment.
  """
  figure, panels = plt.subplots(
    1,
    len(gates),
    figsize=(1 + 4 * len(gates), 4.4),
    layout="constrained",
    squeeze=False,
    sharey=True,
  )
  image = None
  for axes, (layer, weights) in zip(panels[0], gates.items(), strict=True):
    shares = relative_shares(weights.mean(axis=1), segment_length)
    t, segments = shares.shape
    image = axes.imshow(
      shares.T,
      aspect="auto",
      origin="lower",
      interpolation="nearest",
      extent=(0, t, -0.5, segments - 0.5),
      cmap="PuOr_r",
      norm=matplotlib.colors.LogNorm(1 / 4, 4),
    )
    axes.set(xlabel="byte of the passage", title=f"layer {layer}")
  panels[0, 0].set_ylabel("memory of segment")
  assert image is not None
  figure.colorbar(
    image,
    ax=list(panels[0]),
    label="gate / equal share, mean of the heads",
    ticks=[1 / 4, 1 / 2, 1, 2, 4],
    format="{x:g}",
    extend="both",
  ).minorticks_off()
  figure.suptitle(
    "What each byte of a held-out passage reads: its online memory (diagonal)\n"
    "and the cached memories of earlier segments (below it)",
    fontsize="medium",
  )
  _save(figure, path)


def relative_shares(weights: np.ndarray, segment_length: int) -> np.ndarray:
  """Gates [t s+1], online last, as multiples of an equal share.

  Returns:
    [t segments]: the online memory stands at its own segment, and what does
    not exist yet is nan. Were a byte to read all its memories alike, its row
    would be ones.
  """
  t = len(weights)
  own = np.arange(t) // segment_length
  segments = own[-1] + 1
  shares = np.zeros((t, segments))
  cached = weights[:, :-1]
  shares[:, : cached.shape[1]] = cached[:, :segments]
  shares[np.arange(t), own] = weights[:, -1]
  shares[np.arange(segments) > own[:, None]] = np.nan
  return shares * (own[:, None] + 1)


def _save(figure, path: pathlib.Path) -> None:
  figure.savefig(path, dpi=150)
  plt.close(figure)
