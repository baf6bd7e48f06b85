"""Which implementation of an op runs.

There are two in XLA, which run everywhere, and kernels, each for one kind of
accelerator. A kernel that cannot take a call says why.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from memcache_jax import sharding
from memcache_jax.array_typing import PyTree

Implementation: TypeAlias = Literal["reference", "xla", "mosaic_tpu", "triton"]
Choice: TypeAlias = Literal[
  "reference", "xla", "mosaic_tpu", "triton", "by_platform"
]

_KERNELS = ("mosaic_tpu", "triton")
_NAMES = ("reference", "xla", *_KERNELS)
# Kernels that run where nobody chooses, and the platform of each. Not those for
# GPUs: they have been run on none, and need more shared memory than small ones
# have, which is not known when a program is lowered.
_PLATFORMS = {"mosaic_tpu": "tpu"}


def resolve(
  op: str,
  implementation: str | None,
  kernels: Mapping[str, str | None] | None = None,
) -> Choice:
  """Turns the public `implementation` argument into the one to run.

  ``None`` takes the fastest one that is trusted for the op and the call. An
  explicit choice never falls back to another.

  Args:
    op: its name.
    implementation: the argument.
    kernels: the kernels of the op; why each cannot take the call, or None.

  Returns:
    A name, or "by_platform" where the platform that the program is lowered
    for decides between kernels and "xla".

  Raises:
    ValueError: for a name that does not exist.
    NotImplementedError: for one that this op, or this call, does not have.
  """
  kernels = {} if kernels is None else kernels
  match implementation:
    case None:
      return "by_platform" if runs_unasked(kernels) else "xla"
    case "xla" | "reference":
      return implementation
    case "mosaic_tpu" | "triton":
      reason = kernels.get(implementation, "there is none")
      if reason is None:
        return implementation
      raise NotImplementedError(
        f"{op} cannot run as a {implementation!r} kernel: {reason}. Use "
        "implementation='xla', which runs on every platform, or None."
      )
    case _:
      raise _unknown(implementation)


def runs_unasked(kernels: Mapping[str, str | None]) -> bool:
  """Whether ``None`` may take one of these kernels, see `resolve`."""
  return any(kernels.get(name, "none") is None for name in _PLATFORMS)


def run(
  choice: Choice,
  xla: Callable[..., Any],
  kernels: Mapping[str, Callable[..., Any] | None],
  *args: Any,
) -> Any:
  """Calls the chosen kernel, or the one of the platform lowered for.

  Args:
    choice: what `resolve` returned.
    xla: what runs where no kernel does.
    kernels: by name; None for one that cannot take the call.
    *args: arrays, for whichever runs.
  """
  if choice == "by_platform":
    branches = {
      platform: kernel
      for name, platform in _PLATFORMS.items()
      if (kernel := kernels.get(name))
    }
    return jax.lax.platform_dependent(*args, default=xla, **branches)
  kernel = kernels.get(choice)
  return xla(*args) if kernel is None else kernel(*args)


def run_spread(
  op: str,
  choice: Choice,
  xla: Callable[..., PyTree],
  kernels: Mapping[str, Callable[..., PyTree]],
  gradients: Mapping[str, Callable[..., tuple[Any, ...]]] | None,
  inputs: tuple[Any, ...],
  axes: tuple[Any, ...],
  output_axes: PyTree,
) -> PyTree:
  """`run` on every device's own rows and heads, with a gradient.

  There is a first derivative only: a kernel has no more, and which one runs is
  known when the program is lowered. Where kernels have none and nobody chose
  one, what is differentiated is the XLA form, which then does nothing twice.

  Args:
    op: its name.
    choice: what `resolve` returned.
    xla: what runs where no kernel does; of the inputs, and nothing else that
      is traced.
    kernels: by name, of the inputs.
    gradients: by name, of the inputs and the gradient of the output: those of
      the inputs that are not integers. None: the XLA form's everywhere.
    inputs: trees of arrays.
    axes: letters of their axes.
    output_axes: of the output, likewise a tree.
  """
  floats = [i for i, x in enumerate(inputs) if _is_floating(x)]

  def forward(*inputs):
    one = lambda *inputs: run(choice, xla, kernels, *inputs)
    spread = lambda *inputs: sharding.over_devices(
      one, inputs, axes, output_axes
    )
    return first_order(op, spread, *inputs), inputs

  def xla_forward(*inputs):
    def of_floats(*values):
      now = list(inputs)
      for i, value in zip(floats, values, strict=True):
        now[i] = value
      return xla(*now)

    return jax.vjp(of_floats, *(inputs[i] for i in floats))

  def xla_gradient(*args):
    *inputs, gradient = args
    return xla_forward(*inputs)[1](gradient)

  def kernel_gradient(*args):
    one = lambda *args: run(choice, xla_gradient, gradients or {}, *args)
    return sharding.over_devices(
      one, args, (*axes, output_axes), tuple(axes[i] for i in floats)
    )

  def backward(inputs, gradient):
    # That of XLA is not taken on devices' own rows: what rows share is summed
    # over all of them.
    rule = xla_gradient if gradients is None else kernel_gradient
    return of_all(first_order(op, rule, *inputs, gradient))

  def of_all(found):
    everything = [None] * len(inputs)
    for i, x in zip(floats, found, strict=True):
      everything[i] = x
    return tuple(everything)

  call = jax.custom_vjp(lambda *inputs: forward(*inputs)[0])
  if gradients is None and choice == "by_platform":
    call.defvjp(xla_forward, lambda pull, gradient: of_all(pull(gradient)))
  else:
    call.defvjp(forward, backward)
  return call(*inputs)


def _is_floating(tree):
  return all(
    jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(tree)
  )


def check_name(implementation: str | None) -> None:
  """Raises ValueError for an implementation that does not exist."""
  if implementation is not None and implementation not in _NAMES:
    raise _unknown(implementation)


def _unknown(implementation: object) -> ValueError:
  return ValueError(
    f"`implementation` must be None or one of {_NAMES}: got {implementation!r}."
  )


def of_op(
  implementation: Implementation | None, *kernels: str
) -> Implementation | None:
  """What the choice for a memory means for one of the ops it is made of.

  Args:
    implementation: of the memory.
    *kernels: those that the op has; another one is left to ``None``.
  """
  other = implementation in _KERNELS and implementation not in kernels
  return None if other else implementation


def why_not_installed() -> str | None:
  """Why no kernel can run at all, as in a bare checkout; None if they can."""
  if importlib.util.find_spec("memcache_jax.pallas_kernels") is None:
    return "memcache_jax.pallas_kernels is not installed"
  return None


def kernel_module(name: str) -> ModuleType:
  """Imports ``memcache_jax.pallas_kernels.<name>``."""
  return importlib.import_module(f"memcache_jax.pallas_kernels.{name}")


def first_order(op: str, rule: Callable[..., Any], *args: Any) -> Any:
  """Runs a rule of a `custom_vjp` that has no derivative of its own.

  Raises:
    NotImplementedError: when it is differentiated, for a second derivative.
  """
  run_once = jax.custom_jvp(rule)

  @run_once.defjvp
  def _(primals, tangents):
    del primals, tangents
    raise NotImplementedError(
      f"{op} has first derivatives only where it may run as a kernel: use "
      "implementation='xla' for higher ones."
    )

  return run_once(*args)
