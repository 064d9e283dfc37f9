"""Waiting for something that must happen: no test sleeps and hopes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 240.0
"""Long enough for a machine with ten times too much to do, and less than a test may take (pyproject.toml)."""


def until(
    happened: Callable[[], Any],
    what: str = "what was waited for",
    *,
    stop: threading.Event | None = None,
    every_s: float = 0.01,
) -> Any:
    """What `happened` gives, once that is true. It is asked `every_s`.

    Raises:
        AssertionError: `stop` was set first, which says that it cannot happen any more, or patience ended.
    """
    ended, give_up = stop or threading.Event(), time.monotonic() + PATIENCE_S
    while not (result := happened()):
        if ended.wait(every_s):
            raise AssertionError(f"the run ended before {what}")
        if stop is None and time.monotonic() > give_up:
            raise AssertionError(f"did not happen: {what}")
    return result
