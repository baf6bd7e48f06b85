"""The embedded country profiles, and what can be asked about them."""

import hashlib
import pathlib

import numpy as np

from examples.data import make_profiles
from examples.data.profiles import SEPARATOR, profiles
from memcache_jax.tasks import Extraction, string_match_any
from tests.tasks.readers import find_line, last_quarter

ROOT = pathlib.Path(__file__).parents[2]


def test_the_profiles_are_those_the_readme_describes():
  text = SEPARATOR.join(profiles()).encode()
  readme = (ROOT / "examples" / "data" / "README.md").read_text()
  assert hashlib.sha256(text).hexdigest() in readme
  assert f"{len(text):,} bytes" in readme
  assert len(profiles()) == 261


def test_who_reads_the_whole_window_knows_the_value(as_a_user):
  pages = profiles()[100:110]
  task = Extraction(length=2048, documents=pages)
  assert len(task.facts) > 1000
  rng = np.random.default_rng(0)
  samples = [task.sample(rng) for _ in range(40)]
  answers = [sample.answers for sample in samples]
  outputs = [find_line(sample.prompt) for sample in samples]
  assert string_match_any(outputs, answers) == 1.0
  outputs = [last_quarter(find_line)(sample.prompt) for sample in samples]
  assert string_match_any(outputs, answers) < 0.2


def test_profiles_become_lines():
  profile = {
    "Geography": {
      "Area": {"total": {"text": "12  sq\nkm"}, "land": {"text": None}},
      "Climate": {"text": "mild"},
    },
    "Note": {"text": "new"},
  }
  assert make_profiles.page(profile) == (
    "Area - total: 12 sq km\nClimate: mild\nNote: new"
  )
