"""Waiting for something that must happen: no test sleeps and hopes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 600.0
"""Long enough for a machine with ten times too much to do, and less than a test may take (pyproject.toml)."""


def until(
    happened: Callable[[], Any],
    what: str = "what was waited for",
    *,
    stop: threading.Event | None = None,
    every_s: float = 0.01,
) -> Any:
    """Call `happened` every `every_s` seconds until it returns something true, and return that.

    Raises:
        AssertionError: `stop` was set first (it can no longer happen), or TIMEOUT_S passed.
    """
    ended, give_up = stop or threading.Event(), time.monotonic() + TIMEOUT_S
    while not (result := happened()):
        if ended.wait(every_s):
            raise AssertionError(f"the run ended before {what}")
        if stop is None and time.monotonic() > give_up:
            raise AssertionError(f"did not happen: {what}")
    return result
