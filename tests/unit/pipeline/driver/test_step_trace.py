"""The trace of a step in a list of traces, whichever driver ran its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.driver.tracked import previews
from pipeline.graph.graph import Node, step_nodes
from pipeline.observe.history import History
from pipeline.workers.messages import Outcome
from tests.support.report_runs import WrittenRun, write_run


def ran(history: History, step: int, stages: set[str]) -> list[tuple[Node, Outcome]]:
    """Return nodes of a step with their outcomes, as the driver has them."""
    found = []
    for node in step_nodes(history.spec, step):
        commit = history.ledger.find(node.address)
        if node.stage in stages and commit is not None:
            found.append((node, Outcome(node.address, "a0", commit.ref(), "w-0", 0, 1.0, 2.0, 0.0)))
    return found


@pytest.mark.parametrize(
    "stages",
    [{"update_policy"}, {"advantage", "update_policy"}, {"generate", "advantage", "update_policy"}],
    ids=["after a resume, the updates alone", "the rows are an earlier driver's", "all is this driver's"],
)
def test_a_step_is_shown_whole_whoever_ran_it(tmp_path: Path, stages: set[str]) -> None:
    history = write_run(tmp_path, WrittenRun("demo", steps=3)).history
    asked, answered = previews("demo", 2, ran(history, 2, stages), history)
    assert (asked, answered) == ("demo · step 2 · v1", "reward 0.235 KL 0.5")


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    history = write_run(tmp_path, WrittenRun("demo", steps=3, done=1)).history
    assert previews("demo", 2, [], history) == ("demo · step 2", "")
