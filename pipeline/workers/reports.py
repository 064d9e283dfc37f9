"""What workers report to the driver, as text: JSON of nothing but numbers, strings and lists, so that reading a report
runs nothing. (What the driver sends to a worker is a task, which runs there in any case.)

May import the standard library, pipeline.workers.messages, migration's load records and storage.address.
"""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from typing import Any

from pipeline.workers.messages import FailureKind, MoveOver, Outcome, RankFailure, Rested, RowsNews
from stages.engines.row_loads import EngineLoad, RowLoad
from storage.address import Address, Ref


class BadReport(ValueError):
    """A text that is no report of a worker; says what is the matter."""


def outcome_to_json(attempt: str, outcome: Outcome) -> str:
    """For the topic `OUTCOMES`. Raises TypeError for a reference whose state is not JSON."""
    return json.dumps({"attempt": attempt, "outcome": outcome}, default=_fields)


def outcome_from_json(text: str) -> tuple[str, Outcome]:
    """What `outcome_to_json` wrote: the attempt and its outcome. Raises BadReport."""
    try:
        document = json.loads(text)
        given = document["outcome"]
        return str(document["attempt"]), _outcome(given)
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no outcome of a call: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def failure_to_json(failure: RankFailure) -> str:
    """For the topic `FAILURES`."""
    return json.dumps(failure, default=_fields)


def failure_from_json(text: str) -> RankFailure:
    """What `failure_to_json` wrote. Raises BadReport."""
    try:
        given = json.loads(text)
        return RankFailure(
            address=_address(given["address"]),
            attempt=str(given["attempt"]),
            worker=str(given["worker"]),
            incarnation=int(given["incarnation"]),
            index=int(given["index"]),
            kind=FailureKind(given["kind"]),
            error=str(given["error"]),
            text=str(given["text"]),
            missing=tuple(map(int, given["missing"])),
            passing=bool(given["passing"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no failure of a rank: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def rows_to_json(report: RowsNews | MoveOver) -> str:
    """For the topic `TAILS`."""
    return json.dumps({type(report).__name__: report}, default=_fields)


def rows_from_json(text: str) -> RowsNews | MoveOver:
    """What `rows_to_json` wrote. Raises BadReport."""
    try:
        ((kind, given),) = json.loads(text).items()
        match kind:
            case "RowsNews":
                return RowsNews(**_replica(given), here=_load(given["here"]), away=_addresses(given["away"]))
            case "MoveOver":
                return MoveOver(
                    **_replica(given),
                    number=int(given["number"]),
                    num_rows=int(given["num_rows"]),
                    num_bytes=int(given["num_bytes"]),
                    seconds=float(given["seconds"]),
                    away=_addresses(given["away"]),
                    refusal=None if given["refusal"] is None else str(given["refusal"]),
                )
        raise ValueError(f"there is no {kind}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no report of rows: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def rested_to_json(report: Rested) -> str:
    """For the topic `RESTED`."""
    return json.dumps(report, default=_fields)


def rested_from_json(text: str) -> Rested:
    """What `rested_to_json` wrote. Raises BadReport."""
    try:
        given = json.loads(text)
        error = None if given["error"] is None else str(given["error"])
        return Rested(**_replica(given), number=int(given["number"]), seconds=float(given["seconds"]), error=error)
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no report of rest: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def _fields(record: object) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is not JSON: {record!r}")
    return vars(record)


def _address(given: dict[str, Any]) -> Address:
    return Address(str(given["stage"]), int(given["step"]), int(given["shard"]))


def _addresses(given: list[dict[str, Any]]) -> tuple[Address, ...]:
    return tuple(map(_address, given))


def _outcome(given: dict[str, Any]) -> Outcome:
    return Outcome(
        address=_address(given["address"]),
        ref=None if given["ref"] is None else _ref(given["ref"]),
        worker=str(given["worker"]),
        index=int(given["index"]),
        started=float(given["started"]),
        finished=float(given["finished"]),
        store_s=float(given["store_s"]),
        reused=bool(given["reused"]),
        warnings=tuple(map(str, given["warnings"])),
        peers=tuple(map(_outcome, given["peers"])),
    )


def _ref(given: dict[str, Any]) -> Ref:
    metrics = {str(name): float(value) for name, value in given["metrics"].items()}
    times = float(given["started"]), float(given["finished"])
    return Ref(_address(given["address"]), str(given["attempt"]), metrics, dict(given["state"]), *times)


def _replica(given: dict[str, Any]) -> dict[str, Any]:
    return {"gang": str(given["gang"]), "index": int(given["index"]), "incarnation": int(given["incarnation"])}


def _load(given: dict[str, Any]) -> EngineLoad:
    return EngineLoad(
        version=int(given["version"]),
        slots=int(given["slots"]),
        rows=tuple(map(_row, given["rows"])),
        position_bytes=int(given["position_bytes"]),
        pass_s=float(given["pass_s"]),
        prefill_s=float(given["prefill_s"]),
    )


def _row(given: dict[str, Any]) -> RowLoad:
    seed, step, row = map(int, given["key"])
    return RowLoad((seed, step, row), int(given["tokens"]), int(given["cached"]), int(given["left"]))
