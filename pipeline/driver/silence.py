"""Which worker processes say no more that they live: one that is stopped has no heartbeat, one that is slow has.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

_SHORTEST_S = 20.0
"""Importing, and other native code that holds Python's lock, may hold heartbeats up for some of it."""


class Silences:
    """Owns when the last heartbeat of each process was news. Heartbeats bear the scheduler's clock, and are only ever
    compared with each other; `now` is the driver's."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, float]] = {}

    def look(self, heartbeats: Mapping[str, float], now: float) -> dict[str, float]:
        """Seconds since there was news of each process, by name. `heartbeats`: the last of each that there is."""
        before = self._heard
        self._heard = {
            name: before[name] if name in before and before[name][0] == heartbeat else (heartbeat, now)
            for name, heartbeat in heartbeats.items()
        }
        return {name: now - since for name, (_, since) in self._heard.items()}


def stopped(silent_s: float, start_timeout_s: float) -> bool:
    """Whether a process that is being built is taken for stopped: well before its time to be built is over."""
    return silent_s > max(start_timeout_s / 3, _SHORTEST_S)
