"""The folder of a run: one run each, recognised by its settings."""

import json
import pathlib

SETTINGS = "settings.json"


class InputError(Exception):
  """Something the user can put right; shown as one line, no traceback."""


def differences(now: dict, saved: dict) -> str:
  """How saved settings differ from those of now, for people."""
  names = [*now, *(saved.keys() - now.keys())]
  return ", ".join(
    f"{name} {saved.get(name)} (now {now.get(name)})"
    for name in names
    if now.get(name) != saved.get(name)
  )


def claim(workdir: pathlib.Path, settings: dict) -> None:
  """Makes the folder of this run, or recognises it.

  Args:
    workdir: the folder.
    settings: what makes it this run and no other, by name.

  Raises:
    InputError: when the folder holds another run, or anything else.
  """
  path = workdir / SETTINGS
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if path.exists():
      saved = json.loads(path.read_text())
    elif any(workdir.iterdir()):
      raise InputError(
        f"{workdir} is not empty and holds no run: choose another --workdir"
      )
    else:
      path.write_text(json.dumps(settings, indent=2) + "\n")
      return
  except OSError as error:
    raise InputError(f"cannot use {workdir}: {error.strerror}") from None
  except ValueError:
    raise InputError(f"{path} is damaged: choose another --workdir") from None
  # Through JSON, so that tuples are what a file makes of them.
  different = differences(json.loads(json.dumps(settings)), saved)
  if different:
    raise InputError(
      f"{workdir} holds a run of other settings, {different}: "
      "choose another --workdir"
    )
