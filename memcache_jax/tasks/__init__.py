"""Recall tests: generators of questions whose answers stand in the text.

Everything is NumPy in and NumPy out, and equal generators of random numbers
give equal data.
"""

from memcache_jax.tasks._base import Batch, Sample, Task, TextTask
from memcache_jax.tasks._extraction import Extraction, Fact
from memcache_jax.tasks._mqar import MQAR
from memcache_jax.tasks._needle import NeedleInHaystack
from memcache_jax.tasks._phonebook import Phonebook
from memcache_jax.tasks._scoring import (
  exact_match,
  string_match_all,
  string_match_any,
  token_accuracy,
)
from memcache_jax.tasks._selective_copy import SelectiveCopy
from memcache_jax.tasks._tokenizer import (
  ByteTokenizer,
  Tokenizer,
  WordTokenizer,
)

__all__ = [
  "MQAR",
  "Batch",
  "ByteTokenizer",
  "Extraction",
  "Fact",
  "NeedleInHaystack",
  "Phonebook",
  "Sample",
  "SelectiveCopy",
  "Task",
  "TextTask",
  "Tokenizer",
  "WordTokenizer",
  "exact_match",
  "string_match_all",
  "string_match_any",
  "token_accuracy",
]
