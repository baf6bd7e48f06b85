"""The reference files are whole, and the measure of error measures."""

import json

import numpy as np
import pytest

from tests import golden


def test_the_manifest_describes_every_file():
  manifest = json.loads((golden.FOLDER / "manifest.json").read_text())
  on_disk = {path.name for path in golden.FOLDER.glob("*.npz")}
  assert {entry["file"] for entry in manifest} == on_disk
  for entry in manifest:
    with np.load(golden.FOLDER / entry["file"]) as arrays:
      stored = {
        key: {"shape": list(arrays[key].shape), "dtype": str(arrays[key].dtype)}
        for key in arrays.files
      }
    assert stored == entry["arrays"], entry["name"]


def test_inputs_lose_nothing_in_float32():
  for case in golden.cases():
    for name, x in case.inputs.items():
      if x.dtype == np.float64:
        np.testing.assert_array_equal(x, x.astype(np.float32), case.name + name)


def test_there_is_a_gradient_for_every_input_that_is_differentiated():
  for case in golden.cases():
    for name, gradient in case.gradients.items():
      assert gradient.shape == case.inputs[name].shape, (case.name, name)


def test_cases_are_chosen_by_name():
  names = [case.name for case in golden.cases("titans_grm")]
  assert names
  assert all("titans_grm" in name for name in names)
  assert len(names) < len(list(golden.cases()))


def test_error_is_relative_and_notices_shapes():
  ref = np.asarray([3.0, -4.0])
  assert golden.error(ref, ref) == 0.0
  assert golden.error(1.1 * ref, ref) == pytest.approx(0.1)
  assert golden.error([1e-6, 0.0], np.zeros(2)) == pytest.approx(
    1e-3 / np.sqrt(2)
  )
  assert golden.error([], np.zeros(0)) == 0.0
  with pytest.raises(ValueError, match="shapes differ"):
    golden.error(ref[None], ref)
