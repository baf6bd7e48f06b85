"""Ctrl-C as a request, for training loops."""

import os
import signal


class Interrupt:
  """Ctrl-C as a request, so that no step and no checkpoint is cut in two.

  Inside `with`, the first one sets `requested`; a second one ends at once.
  """

  requested = False

  def __enter__(self) -> "Interrupt":
    self._before = signal.signal(signal.SIGINT, self._on_signal)
    return self

  def __exit__(self, *exception) -> None:
    signal.signal(signal.SIGINT, self._before)

  def _on_signal(self, number, frame) -> None:
    del number, frame
    self.requested = True
    # Not print: the signal may have come in the middle of one.
    os.write(2, b"\nStopping after this step; Ctrl-C again to stop at once.\n")
    signal.signal(signal.SIGINT, signal.default_int_handler)
