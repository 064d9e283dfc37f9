"""What the policy answers to the held-out prompts, before and after training: the part of a run that is read as text.

May import storage and this folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.observe.history import History
from storage.records import Rollout
from storage.vocabulary import Decode


@dataclass(frozen=True)
class ResponsePair:
    """The responses of two versions of the weights to one held-out prompt."""

    prompt: str
    before: str
    before_score: float
    after: str
    after_score: float
    before_kl: float | None = None
    """To the reference, nats over the response; None where the reference has not looked at it."""
    after_kl: float | None = None


def response_pairs(history: History, decode: Decode) -> list[ResponsePair]:
    """The held-out prompts with the responses of the first and the last evaluated version; empty before the second."""
    evaluations = history.evaluations()
    if len(evaluations) < 2:
        return []
    versions = [evaluations[i].version for i in (0, -1)]
    (rows, scores), (rows_after, scores_after) = map(history.evaluated, versions)
    kl, kl_after = (history.evaluated_kl(v, r) for v, r in zip(versions, (rows, rows_after), strict=True))
    return [
        ResponsePair(
            prompt=decode(rows.tokens[row, : rows.prompt_lengths[row]].tolist()),
            before=_response(rows, row, decode),
            before_score=float(scores.scores[row]),
            after=_response(rows_after, row, decode),
            after_score=float(scores_after.scores[row]),
            before_kl=None if kl is None else kl[row],
            after_kl=None if kl_after is None else kl_after[row],
        )
        for row in range(rows.num_rows)
    ]


def chosen(pairs: Sequence[ResponsePair]) -> list[ResponsePair]:
    """Three of them by how much the score changed: the largest gain, the median, the largest loss (of fewer, all).
    Fixed ones would look like failure, or like success, by chance."""
    by_change = sorted(pairs, key=lambda pair: pair.before_score - pair.after_score)
    places = dict.fromkeys((0, (len(by_change) - 1) // 2, len(by_change) - 1)) if by_change else ()
    return [by_change[place] for place in places]


def samples_table(pairs: Sequence[ResponsePair]) -> str:
    """The responses as a table that MLflow shows: pandas' "split" JSON."""
    columns = ("prompt", "before", "after", "before_score", "after_score", "before_kl", "after_kl")
    rows = [[getattr(pair, column) for column in columns] for pair in pairs]
    return json.dumps({"columns": columns, "data": rows}, ensure_ascii=False, indent=1)


def _response(rollout: Rollout, row: int, decode: Decode) -> str:
    start = int(rollout.prompt_lengths[row])
    return decode(rollout.tokens[row, start : start + int(rollout.response_lengths[row])].tolist())
