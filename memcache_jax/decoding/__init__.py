"""Decoding: prompts in, tokens out, with the state as the only memory."""

from memcache_jax.decoding._export import export_step
from memcache_jax.decoding._generate import generate, stream
from memcache_jax.decoding._offload import to_device, to_host
from memcache_jax.decoding._states import mark, rewind, verify, with_room
from memcache_jax.decoding._steps import decode_step, prefill

__all__ = [
  "decode_step",
  "export_step",
  "generate",
  "mark",
  "prefill",
  "rewind",
  "stream",
  "to_device",
  "to_host",
  "verify",
  "with_room",
]
