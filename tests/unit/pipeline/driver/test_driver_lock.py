"""One driver at a time in a directory, and those who only look whether there is one."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.driver import lock
from pipeline.driver.lock import is_driven, only_driver


def test_who_looks_sees_the_driver_and_keeps_none_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not is_driven(paths)
    assert not paths.lock.exists(), "looking leaves nothing behind"
    with only_driver(paths):
        assert is_driven(paths)
        with pytest.raises(ConfigError, match="is running"), only_driver(paths):
            pass
    assert not is_driven(paths)


def test_a_driver_outlasts_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes at the very moment at which somebody looks."""
    paths = RunPaths(tmp_path)
    paths.lock.touch()
    with paths.lock.open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr(lock.time, "sleep", lambda seconds: fcntl.flock(look, fcntl.LOCK_UN))
        with only_driver(paths):
            assert is_driven(paths)
