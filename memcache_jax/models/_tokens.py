"""Token ids: checked on the host, never wrapped on the device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from memcache_jax.array_typing import Array, Bool


def check_token_ids(
  tokens: Array | np.ndarray,
  vocab_size: int,
  mask: Bool[Array, "..."] | np.ndarray | None = None,
  *,
  name: str = "tokens",
) -> None:
  """Raises ValueError for ids that a model of this vocabulary cannot take.

  Call it where data is loaded. Under a jax transformation, where values are
  not known, only the dtype is checked, and models turn ids out of range into
  nan.

  Args:
    tokens: ids, of any shape.
    vocab_size: ids must lie in 0 ... vocab_size - 1.
    mask: False where an id is padding and may be anything.
    name: what to call the ids in an error.

  Raises:
    ValueError: for ids that are not integers of an array or out of range.

  Example:
    >>> import numpy as np
    >>> from memcache_jax.models import check_token_ids
    >>> check_token_ids(np.array([[0, 300]]), vocab_size=256)
    Traceback (most recent call last):
    ValueError: `tokens` must be ids from 0 to 255: got 300 at (0, 1).
  """
  given = {name: tokens} if mask is None else {name: tokens, "mask": mask}
  for argument, array in given.items():
    if not isinstance(array, jax.Array | np.ndarray):
      raise ValueError(
        f"`{argument}` must be an array: got a {type(array).__name__}."
      )
  if mask is not None and mask.shape != tokens.shape:
    raise ValueError(
      f"`mask` must have the shape of `{name}`, {tokens.shape}: "
      f"got {mask.shape}."
    )
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(
      f"`{name}` must be ids of an integer dtype: got {tokens.dtype}."
    )
  if isinstance(tokens, Tracer) or isinstance(mask, Tracer):
    return
  ids = np.asarray(tokens)
  wrong = (ids < 0) | (ids >= vocab_size)
  if mask is not None:
    wrong &= np.asarray(mask)
  if wrong.any():
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise ValueError(
      f"`{name}` must be ids from 0 to {vocab_size - 1}: "
      f"got {int(ids[place])} at {place}."
    )
