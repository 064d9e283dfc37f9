"""The section `mismatch`: how engine and trainer are compared at each version, and when that is an alarm.

May import storage.problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from storage.problems import Problem, above, at_least

FLOAT32_ALARM_NATS = 0.01
BFLOAT16_ALARM_NATS = 0.05
"""exp(0.05) is 1.05. Measured on a healthy SmolLM2-135M: 6e-6 nats in float32, 0.014 to 0.030 in bfloat16."""


@dataclass
class MismatchConfig:
    """Canaries: rows that engine and trainer both score with the same version."""

    rows: int = 4
    """Rows of the first shard that are canaries, at most all of them; 0: no comparison."""
    tokens: int = 8
    """Sampled tokens of each."""
    alarm_nats: float | None = None
    """Mean absolute difference of their log-probs above which there is an alarm; null: 0.05, or 0.01 where both
    compute in float32."""
    stop: bool = False
    """An alarm ends the run. Otherwise it is a warning, an event and a metric."""


def mismatch_problems(config: MismatchConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    yield from at_least(0, {"mismatch.rows": config.rows})
    yield from at_least(1, {"mismatch.tokens": config.tokens})
    need = " nats (0.05 is usual in bfloat16), or null for the default"
    yield from above(0, {"mismatch.alarm_nats": config.alarm_nats}, need)
    if config.stop and not config.rows:
        need = "without canaries (mismatch.rows=0) there is no alarm to stop at: set mismatch.rows, or false"
        yield Problem("mismatch.stop", config.stop, need)
