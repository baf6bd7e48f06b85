"""What a memory consumes: tokens with their gates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from memcache_jax.array_typing import Leaf
from memcache_jax.memories._gate import Gate, HeadShape
from memcache_jax.ops import _checks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
  """A stretch of tokens as a memory consumes it.

  Attributes:
    q: queries [b t n k].
    k: keys [b t n k].
    v: values [b t n v].
    gates: what the memory's `gates()` asks for, by name, in natural form,
      float32: [b t n], [b t n width], or [b t n k] for a connector.
    mask: False for a token that does not exist [b t]: no write, no decay, no
      momentum, no position; its y is 0.
    starts: True at the first token of a document [b t], before which
      everything is forgotten. Ignored on masked tokens.
    max_unaligned_starts: most starts per row of this call that may lie off
      the memory's own grid (segments, inner batches). It fixes the size of
      the padded layout, so that under `jax.jit` it has to be given whenever
      `starts` is; a row with more of them becomes nan. 0 for documents packed
      to segment borders.
    segment_ends: True at the last token of a segment [b t], for memories with
      `Explicit` segments only. Ignored on masked tokens.
    seeds: random bits of each token [b t], uint32, for what a memory draws in
      training, which is the same however tokens are split into calls. None:
      nothing is drawn.
  """

  q: Leaf
  k: Leaf
  v: Leaf
  gates: Mapping[str, Leaf] = field(default_factory=dict)
  mask: Leaf = None
  starts: Leaf = None
  max_unaligned_starts: int | None = field(
    default=None, metadata={"static": True}
  )
  segment_ends: Leaf = None
  seeds: Leaf = None

  @property
  def head_shape(self) -> HeadShape:
    return HeadShape(self.q.shape[2], self.q.shape[3], self.v.shape[3])


def check_tokens(memory: Any, tokens: Tokens) -> None:
  """Raises ValueError unless the tokens are what the memory asks for."""
  specs = {
    "q": (tokens.q, "b t n k"),
    "k": (tokens.k, "b t n k"),
    "v": (tokens.v, "b t n v"),
    "mask": (tokens.mask, "b t"),
    "starts": (tokens.starts, "b t"),
    "segment_ends": (tokens.segment_ends, "b t"),
    "seeds": (tokens.seeds, "b t"),
  }
  if tokens.segment_ends is not None and not memory.uses_segment_ends:
    raise ValueError(
      "`segment_ends` must be None for a memory without explicit segments: "
      f"got flags for {memory}."
    )
  wanted = memory.gates()
  _checks.check_mapping(Gate, gates=wanted)
  if set(wanted) != set(tokens.gates):
    raise ValueError(
      f"`gates` must be {sorted(wanted)}, as {memory} asks: "
      f"got {sorted(tokens.gates)}."
    )
  for name, gate in wanted.items():
    axes = " ".join(["b t n", *map(str, gate.axes(tokens.q.shape[-1]))])
    specs[f"gates[{name!r}]"] = (tokens.gates[name], axes)
  _checks.check_shapes(specs)
  _checks.check_given(q=tokens.q)
  _checks.check_floating(q=tokens.q, k=tokens.k, v=tokens.v, **tokens.gates)
  _checks.check_same_dtype(q=tokens.q, k=tokens.k, v=tokens.v)
  _checks.check_bool(
    mask=tokens.mask, starts=tokens.starts, segment_ends=tokens.segment_ends
  )
  if tokens.seeds is not None and tokens.seeds.dtype != jnp.uint32:
    raise ValueError(f"`seeds` must be uint32: got {tokens.seeds.dtype}.")
  bound = tokens.max_unaligned_starts
  number = isinstance(bound, int) and not isinstance(bound, bool)
  if bound is not None and not (number and bound >= 0):
    raise ValueError(
      f"`max_unaligned_starts` must be None or an int of at least 0: "
      f"got {bound!r}."
    )
