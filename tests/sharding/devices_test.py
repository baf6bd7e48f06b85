"""The sharding tests mean something only on eight devices."""

import jax


def test_there_are_eight_devices():
  assert jax.device_count() == 8


def test_an_array_is_spread_over_them():
  mesh = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
  x = jax.device_put(jax.numpy.zeros((8, 8)), sharding)
  assert {shard.data.shape for shard in x.addressable_shards} == {(2, 4)}
  assert len({shard.device for shard in x.addressable_shards}) == 8
