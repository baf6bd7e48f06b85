"""Models of this library in EleutherAI's lm-evaluation-harness.

Needs the extra `eval`, and nothing else of the library imports it.
"""

import pathlib

from memcache_jax.evaluation._harness import HarnessModel

TASKS = pathlib.Path(__file__).with_name("tasks")
"""Task files for what the harness does not have, a folder for its
`TaskManager(include_path=...)`: TriviaQA, DROP and Natural Questions with the
answer in the text, as `based_triviaqa`, `based_drop` and `based_nq_512` (1024,
2048)."""

__all__ = ["TASKS", "HarnessModel"]
