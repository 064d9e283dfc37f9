"""A reward that is the mean of several, and knows where they disagree. May import numpy and stages.rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.rewards.protocol import Batched, ReadsFields, Sample, Scored
from stages.rewards.registry import build_reward, close_reward, closing_on_error


class EnsembleReward:
    """Owns its members. The score is their mean; the disagreement, their standard deviation (over the members, divided
    by their number), tells where a policy has gone to where they were not made for (Coste et al., arXiv 2310.02743)."""

    def __init__(
        self, members: Mapping[str, Mapping[str, Any]], timeout_s: float = 60.0, _directory: Path | None = None
    ) -> None:
        """`members`: name -> {kind, args}. `timeout_s`: of users' own among them."""
        if len(members) < 2:
            raise ValueError(f"members has {len(members)}: an ensemble has 2 or more, as NAME: {{kind: .., args: ..}}")
        with closing_on_error() as undo:
            self._members, self._names = [], list(members)
            for name, member in members.items():
                args = member.get("args", {})
                if "kind" not in member or member.keys() - {"kind", "args"} or not isinstance(args, Mapping):
                    raise ValueError(f"members.{name} is {member!r}: it must have a kind, may have args, and no more")
                reward = build_reward(str(member["kind"]), args, f"members.{name}", timeout_s, _directory)
                undo.callback(close_reward, reward)
                self._members.append(reward)
        self.deterministic = all(member.deterministic for member in self._members)
        budgets = [m.batch_tokens for m in self._members if isinstance(m, Batched) and m.batch_tokens is not None]
        self.batch_tokens = min(budgets, default=None)
        reading = [member.fields for member in self._members if isinstance(member, ReadsFields)]
        self.fields = frozenset[str]().union(*reading)

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        given = [member(samples) for member in self._members]
        scores = np.stack([_total(one, len(samples)) for one in given])
        measured = {
            f"{name}-{of}": numbers
            for name, one in zip(self._names, given, strict=True)
            if isinstance(one, Scored)
            for of, numbers in one.measured.items()
        }
        return Scored({"": scores.mean(axis=0).tolist()}, scores.std(axis=0).tolist(), measured)

    def close(self) -> None:
        for member in self._members:
            close_reward(member)


def _total(given: Sequence[float] | Scored, rows: int) -> np.ndarray:
    """A member's numbers, float64 [rows]. Raises ValueError where they are not so many."""
    parts = given.parts.values() if isinstance(given, Scored) else [given]
    arrays = [np.asarray(part, np.float64) for part in parts]
    for array in arrays:
        if array.shape != (rows,):
            raise ValueError(f"a member gave {array.shape} scores for {rows} rows")
    return np.sum(arrays, axis=0)
