"""Eight CPU devices for `pytest tests/sharding`.

The number of devices is fixed once a backend runs, so these tests are left
out of a plain `pytest` and form a process of their own.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)
