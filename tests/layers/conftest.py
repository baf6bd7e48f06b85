"""Fixtures of the layer tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def no_shape_checks() -> Iterator[None]:
  """Switches jaxtyping off, so that the errors users see can be tested."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
