"""One driver at a time in a directory (the lock itself: tests/unit/storage/test_held_locks.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.driver.session import only_driver


def test_a_second_driver_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with only_driver(paths), pytest.raises(ConfigError, match=r"process \d+ on .* is running"), only_driver(paths):
        pass
