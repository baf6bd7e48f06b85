"""Models of this library in EleutherAI's lm-evaluation-harness.

Needs the extra `eval`, and nothing else of the library imports it.
"""

from memcache_jax.evaluation._harness import HarnessModel

__all__ = ["HarnessModel"]
