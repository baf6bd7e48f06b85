"""Prompt and score of questions whose answers stand in the text before them.

Protocol: Arora et al., arXiv 2407.05483, and its code
(github.com/HazyResearch/prefix-linear-attention). The files in `tasks` name
these functions.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from memcache_jax.tasks import string_match_any

# What TriviaQA's pages have between their parts.
_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")


def prompt(doc: Mapping[str, Any]) -> str:
  """`context. question`; a context that ends in the question loses that.

  Args:
    doc: `context` and `question`, which is a sentence left to be finished.
  """
  context, question = doc["context"].strip(), doc["question"].strip()
  while question and context.lower().endswith(question.lower()):
    context = context[: -len(question)]
  return f"{context.strip().strip('.')}. {question}"


def unmarked_prompt(doc: Mapping[str, Any]) -> str:
  """As `prompt`, without the marks in pages of TriviaQA."""
  return prompt({**doc, "context": _MARKS.sub("", doc["context"])})


def contains(
  doc: Mapping[str, Any], results: Sequence[str]
) -> dict[str, float]:
  """Whether the output contains one of the answers, in any case.

  Args:
    doc: `answers`, at least one.
    results: the output.
  """
  return {"contains": string_match_any(results, [doc["answers"]])}
