"""Rows of tokens at the places of their pairs, and back, in fast memory.

A row that is found by number is copied in about one cycle where its number is
found in one: a table in scalar memory is read at columns that are not known
beforehand, and rows that are, which the instruction holds. What is copied are
words of 32 bits: two numbers of bfloat16 share one.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8


def parts(width: int) -> list[int]:
  """Widths of what is copied by itself: one register each, where they fit."""
  if width % LANES:
    return [width]
  return [LANES] * (width // LANES)


def _share(dtype: Any, widths: Sequence[int]) -> bool:
  """Whether two parts of a row are in one word."""
  return dtype == jnp.bfloat16 and set(widths) == {LANES}


def _split(x: jax.Array) -> list[jax.Array]:
  lanes = parts(x.shape[-1])[0]
  return [x[..., i : i + lanes] for i in range(0, x.shape[-1], lanes)]


def encode(*rows: jax.Array) -> list[jax.Array]:
  """Rows [... x] of one dtype -> words [... lanes] uint32 that hold all."""
  split = [part for x in rows for part in _split(x)]
  bits = [
    jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    for x in split
  ]
  if not _share(rows[0].dtype, [x.shape[-1] for x in split]):
    return bits
  pairs = itertools.zip_longest(bits[::2], bits[1::2])
  return [
    low >> 16 if high is None else low >> 16 | high for low, high in pairs
  ]


def decode(
  words: Sequence[jax.Array], dtype: Any, *widths: int
) -> list[jax.Array]:
  """What was encoded [c x], in float32."""
  counts = [len(parts(width)) for width in widths]
  if _share(dtype, sum(map(parts, widths), [])):
    high = jnp.uint32(0xFFFF0000)
    words = [y for x in words for y in (x << 16, x & high)]
  rest = iter(jax.lax.bitcast_convert_type(x, jnp.float32) for x in words)
  return [
    jnp.concatenate(list(itertools.islice(rest, count)), axis=1)
    for count in counts
  ]


def spread(sources, words, table, tokens: int) -> None:
  """Copies rows of tokens to the places of their pairs.

  Args:
    sources: for each word of a row, references to [t lanes].
    words: likewise to the places [places lanes].
    table: reference to the place of each pair [pairs columns], in scalar
      memory.
    tokens: of a column of the table.
  """
  selected = table.shape[0] // tokens

  @pl.loop(0, sources[0].shape[0] // tokens)
  def _(column):
    here = pl.ds(pl.multiple_of(column * tokens, SUBLANES), tokens)
    block = [source.at[here] for source in sources]
    for i in range(tokens):
      rows = [source[pl.ds(i, 1)] for source in block]
      for j in range(selected):
        place = table.at[i * selected + j][column]
        for row, target in zip(rows, words, strict=True):
          target[pl.ds(place, 1)] = row


def combine(values, table, sums, target) -> None:
  """Adds up the rows at the places of each token.

  Args:
    values: for each part of a row, references to the places [places lanes].
    table: as for `spread`.
    sums: for each part, fast memory for the tokens of a column [tokens lanes].
    target: reference to [t x].
  """
  tokens = sums[0].shape[0]
  selected = table.shape[0] // tokens

  @pl.loop(0, target.shape[0] // tokens)
  def _(column):
    for i in range(tokens):
      pairs = range(i * selected, (i + 1) * selected)
      places = [table.at[pair][column] for pair in pairs]
      for source, total in zip(values, sums, strict=True):
        rows = [source[pl.ds(place, 1)] for place in places]
        total[pl.ds(i, 1)] = functools.reduce(jnp.add, rows)
    here = pl.ds(pl.multiple_of(column * tokens, SUBLANES), tokens)
    whole = jnp.concatenate([x[...] for x in sums], axis=1)
    target[here] = whole.astype(target.dtype)


def put(value, targets, first) -> None:
  """Stores [c x] at consecutive places."""
  here = pl.ds(pl.multiple_of(first, SUBLANES), value.shape[0])
  for target, part in zip(targets, _split(value), strict=True):
    target[here] = part


def zero_last(targets) -> None:
  """What a pair without a place reads."""
  for target in targets:
    last = pl.ds(target.shape[0] - SUBLANES, SUBLANES)
    target[last] = jnp.zeros((SUBLANES, target.shape[1]), target.dtype)


def scratch(count: int, widths: Sequence[int], dtype: Any) -> list:
  """Fast memory for as many rows."""
  return [pltpu.VMEM((count, width), dtype) for width in widths]
