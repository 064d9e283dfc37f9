"""The name of a run in the command that started it."""

from __future__ import annotations

import sys

import pytest

from pipeline.observe.provenance import short_command


@pytest.mark.parametrize(
    ("argv", "short"),
    [
        (["/usr/bin/stageline", "run", "conf/demo.yaml", "name=a/b", "--json-lines"], "stageline run demo.yaml"),
        (["/x/pipeline/cli/__main__.py", "resume", "runs/demo/"], "stageline resume demo"),
        ([], ""),
    ],
)
def test_a_short_command_is_a_name(monkeypatch: pytest.MonkeyPatch, argv: list[str], short: str) -> None:
    """MLflow's page shows of a source what follows its last `/`."""
    monkeypatch.setattr(sys, "argv", argv)
    assert short_command() == short
