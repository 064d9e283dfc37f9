"""Reports of workers to the driver survive as text, and text that is no report is refused."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields, replace

import pytest

from pipeline.workers.messages import (
    BadReport,
    FailureKind,
    MigrationDone,
    Outcome,
    RankFailure,
    RowsReport,
    failure_from_json,
    failure_to_json,
    outcome_from_json,
    outcome_to_json,
    rows_from_json,
    rows_to_json,
)
from stages.engines.row_loads import EngineLoad, RowLoad
from storage.address import Address, Ref

HERE, THERE = Address("generate", 7, 3), Address("generate", 8)
REF = Ref(
    Address("advantage", 4), "a1-x", {"kl": 0.1 + 0.2, "loss": -1.0}, {"coefficient": 0.25, "seen": [1, 2]}, 1.5, 2.5
)
PEER = Outcome(REF.address, None, "train-2", 2, 1.25, 2.25, 0.5, ("late",))
OUTCOME = Outcome(REF.address, REF, "train-1", 1, 1.7e9 + 1 / 3, 1.7e9 + 2 / 3, 0.125, ("slow", "«odd»\n"), (PEER,))
FAILURE = RankFailure(
    REF.address, "a1-x", "train-2", 3, 2, FailureKind.MISSING, "RanksMissing", "«where»", (1, 4), True
)
NEWS = RowsReport(
    "generate", 1, 2, EngineLoad(5, 8, (RowLoad((0, 7, 31), 90, 64, 12),), 1024, 0.01, 1e-5), (HERE, THERE)
)
OVER = MigrationDone(3, "generate", 0, 1, 4, 1 << 40, 0.5, (THERE,), "no room")


@pytest.mark.parametrize("outcome", [OUTCOME, replace(OUTCOME, ref=None, warnings=())])
def test_outcomes_survive(outcome: Outcome) -> None:
    """Every number to its last bit."""
    assert outcome_from_json(outcome_to_json("a1-x", outcome)) == ("a1-x", outcome)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_survives(value: float) -> None:
    outcome = replace(OUTCOME, ref=replace(REF, metrics={"loss": value}))
    _, found = outcome_from_json(outcome_to_json("a1-x", outcome))
    assert found.ref is not None
    assert math.isnan(found.ref.metrics["loss"]) if math.isnan(value) else found.ref.metrics["loss"] == value


@pytest.mark.parametrize("kind", FailureKind)
def test_failures_survive(kind: FailureKind) -> None:
    failure = replace(FAILURE, kind=kind)
    assert failure_from_json(failure_to_json(failure)) == failure


@pytest.mark.parametrize("report", [NEWS, OVER, replace(NEWS, away=()), replace(OVER, refusal=None)])
def test_reports_of_rows_survive(report: RowsReport | MigrationDone) -> None:
    found = rows_from_json(rows_to_json(report))
    assert found == report
    assert type(found) is type(report)


def test_nothing_is_left_out() -> None:
    """A field that is added to a record is added here as well: none of these has its default."""
    for record in (OUTCOME, REF, FAILURE, NEWS, OVER):
        for each in fields(record):
            assert getattr(record, each.name) != each.default, each.name


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "null", '{"RowsReport": {}, "MigrationDone": {}}', '{"Runtime": {}}']
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadReport):
        outcome_from_json(text)
    with pytest.raises(BadReport):
        rows_from_json(text)
    with pytest.raises(BadReport):
        failure_from_json(text)


def test_a_report_that_lacks_a_field_is_refused() -> None:
    document = json.loads(outcome_to_json("a", OUTCOME))
    del document["outcome"]["ref"]["address"]["step"]
    with pytest.raises(BadReport, match="KeyError 'step'"):
        outcome_from_json(json.dumps(document))


def test_a_pickle_is_not_loaded() -> None:
    """Loading it would run code."""
    with pytest.raises(BadReport):
        outcome_from_json(pickle.dumps(("a", OUTCOME)))  # type: ignore[arg-type]


def test_a_state_that_is_not_json_is_named() -> None:
    with pytest.raises(TypeError, match="object is not JSON"):
        outcome_to_json("a", replace(OUTCOME, ref=replace(REF, state={"model": object()})))
