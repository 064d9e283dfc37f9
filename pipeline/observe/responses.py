"""What the policy answers to the held-out prompts, before and after training: the part of a run that is read as text.

May import storage and this folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.observe.history import History
from storage.records import Rollout

Decode = Callable[[list[int]], str]
"""Of a tokenizer."""


@dataclass(frozen=True)
class ResponsePair:
    """The responses of two versions of the weights to one held-out prompt."""

    prompt: str
    before: str
    before_score: float
    after: str
    after_score: float


def response_pairs(history: History, decode: Decode) -> list[ResponsePair]:
    """The held-out prompts with the responses of the first and the last evaluated version; empty before the second."""
    evaluations = history.evaluations()
    if len(evaluations) < 2:
        return []
    (rows, scores), (rows_after, scores_after) = (history.evaluated(evaluations[i].version) for i in (0, -1))
    return [
        ResponsePair(
            prompt=decode(rows.tokens[row, : rows.prompt_lengths[row]].tolist()),
            before=_response(rows, row, decode),
            before_score=float(scores.scores[row]),
            after=_response(rows_after, row, decode),
            after_score=float(scores_after.scores[row]),
        )
        for row in range(rows.num_rows)
    ]


def samples_table(pairs: Sequence[ResponsePair]) -> str:
    """The responses as a table that MLflow shows: pandas' "split" JSON."""
    columns = ("prompt", "before", "before_score", "after", "after_score")
    rows = [[getattr(pair, column) for column in columns] for pair in pairs]
    return json.dumps({"columns": columns, "data": rows}, ensure_ascii=False, indent=1)


def _response(rollout: Rollout, row: int, decode: Decode) -> str:
    start = int(rollout.prompt_lengths[row])
    return decode(rollout.tokens[row, start : start + int(rollout.response_lengths[row])].tolist())
