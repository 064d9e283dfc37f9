"""What of a config cannot work: the form in which every section's checks say it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A value that cannot work."""

    key: str
    """Path of the setting, as a user writes it: `engine.slots`."""
    given: object
    need: str
    """What would work."""
