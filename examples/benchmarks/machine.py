"""What a run was made with: commit, processor, versions, load."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def describe() -> dict:
  """The first record of every file of results."""
  packages = ("jax", "jaxlib", "flax")
  return {
    "record": "machine",
    "commit": _commit(),
    "date": datetime.date.today().isoformat(),
    "cpu": _cpu(),
    "cores": os.cpu_count(),
    "system": f"{platform.system()} {platform.machine()}",
    "python": platform.python_version(),
    "versions": {name: importlib.metadata.version(name) for name in packages},
    "load": [round(x, 2) for x in os.getloadavg()],
  }


def sentence(record: dict) -> str:
  versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
  load = ", ".join(map(str, record["load"]))
  return (
    f"Commit {record['commit']}, {record['date']}; "
    f"{record['cpu']}, {record['cores']} cores, "
    f"{record['system']}; Python {record['python']}, {versions}; "
    f"load average at the start {load}."
  )


def _commit() -> str:
  def git(*arguments):
    return subprocess.run(
      ["git", *arguments], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()

  commit = git("rev-parse", "--short", "HEAD") or "unknown"
  # The results themselves do not count as a change.
  changed = git("status", "--porcelain", "--", "memcache_jax")
  return f"{commit} with changes" if changed else commit


def _cpu() -> str:
  info = Path("/proc/cpuinfo")
  if info.exists():
    found = re.search(r"model name\s*:\s*(.+)", info.read_text())
    if found:
      return found[1]
  return platform.processor() or "unknown processor"
