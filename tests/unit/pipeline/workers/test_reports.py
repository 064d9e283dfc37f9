"""Reports of workers to the driver survive as text, and text that is no report is refused."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields, replace

import pytest

from pipeline.workers.messages import FailureKind, MigrationDone, Outcome, RankFailure, Report, RowsReport, SleepReport
from stages.engines.row_loads import EngineLoad, PassCost, RowLoad
from storage import codec
from storage.address import Address, Ref

HERE, THERE = Address("generate", 7, 3), Address("generate", 8)
REF = Ref(
    Address("advantage", 4), "a1-x", {"kl": 0.1 + 0.2, "loss": -1.0}, {"coefficient": 0.25, "seen": [1, 2]}, 1.5, 2.5
)
PEER = Outcome(REF.address, "a1-x", None, "train-2", 2, 1.25, 2.25, 0.5, ("late",))
OUTCOME = Outcome(
    REF.address, "a1-x", REF, "train-1", 1, 1.7e9 + 1 / 3, 1.7e9 + 2 / 3, 0.125, ("slow", "«odd»\n"), (PEER,)
)
FAILURE = RankFailure(
    REF.address, "a1-x", "train-2", 3, 2, FailureKind.MISSING, "RanksMissing", "«where»", (1, 4), True
)
LOAD = EngineLoad(5, 8, (RowLoad((0, 7, 31), 90, 64, 12),), 1024, PassCost(0.01, 2e-3), 1e-5)
NEWS = RowsReport("generate", 1, 2, LOAD, (HERE, THERE))
OVER = MigrationDone(3, "generate", 0, 1, 4, 1 << 40, 0.5, 0.75, (THERE,), "no room")


SLEPT = SleepReport("train", 1, 2, 3, 0.25, "RuntimeError: a shard runs")


@pytest.mark.parametrize(
    "report",
    [
        OUTCOME,
        replace(OUTCOME, ref=None, warnings=()),
        *(replace(FAILURE, kind=kind) for kind in FailureKind),
        NEWS,
        replace(NEWS, load=replace(LOAD, cost=None), waiting=()),
        OVER,
        replace(OVER, refusal=None),
        SLEPT,
        replace(SLEPT, error=None),
    ],
)
def test_reports_survive(report: Report) -> None:
    """Every number to its last bit, and none is taken for a report of another kind."""
    found = codec.decode(Report, codec.encode(report))
    assert found == report
    assert type(found) is type(report)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_survives(value: float) -> None:
    outcome = replace(OUTCOME, ref=replace(REF, metrics={"loss": value}))
    found = codec.decode(Outcome, codec.encode(outcome))
    assert found.ref is not None
    assert math.isnan(found.ref.metrics["loss"]) if math.isnan(value) else found.ref.metrics["loss"] == value


def test_nothing_is_left_out() -> None:
    """A field that is added to a record is added here as well: none of these has its default."""
    for record in (OUTCOME, REF, FAILURE, NEWS, OVER, SLEPT):
        for each in fields(record):
            assert getattr(record, each.name) != each.default, each.name


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"Runtime": {}}', "\x80\x04\x95"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(codec.NotARecord):
        codec.decode(Report, text)


def test_a_report_that_lacks_a_field_is_refused_although_the_field_has_a_default() -> None:
    document = json.loads(codec.encode(OUTCOME))
    del document["ref"]["address"]["shard"]
    with pytest.raises(codec.NotARecord, match=r"ref\.address\.shard"):
        codec.decode(Outcome, json.dumps(document))


def test_a_pickle_is_not_loaded() -> None:
    """Loading it would run code."""
    with pytest.raises(codec.NotARecord):
        codec.decode(Report, pickle.dumps(OUTCOME))


def test_a_state_that_is_not_json_is_named() -> None:
    with pytest.raises(TypeError, match="object is not JSON"):
        codec.encode(replace(OUTCOME, ref=replace(REF, state={"model": object()})))
