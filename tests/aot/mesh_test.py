"""Meshes of pods that are not here; with libtpu: `pytest -m aot tests/aot`."""

import pytest
from jax.experimental import topologies

from examples.lm import sharding
from examples.lm.settings import MeshSettings

pytestmark = pytest.mark.aot("libtpu")


@pytest.mark.parametrize("topology", ["v5e:16x16", "v5p:8x8x4"])
def test_part_of_an_axis_of_the_torus_is_an_axis(topology):
  devices = topologies.get_topology_desc(topology, "tpu").devices
  mesh = sharding.make_mesh(MeshSettings(fsdp=-1, tensor=2), devices)
  assert mesh.devices.shape == (1, len(devices) // 2, 2, 1)
  assert set(mesh.devices.flat) == set(devices)
