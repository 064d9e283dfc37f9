"""Fixtures for several folders of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)
