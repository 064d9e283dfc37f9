"""The two forms of a binding: what runs a stage in a worker.

May import pipeline.workers.messages, pipeline.workers.parts and storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts
from storage.commits import Commit
from storage.records import Record


@dataclass(frozen=True)
class Output:
    """What a stage computed: a record to store, or None on ranks that hold no part of the answer."""

    record: Record | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """JSON that the next step's node reads from the commit."""
    weight_versions: tuple[int, ...] = ()
    mask: np.ndarray | None = None
    """bool [rows, seq], the response mask: where the record's log-probs must not be zero."""


@dataclass(frozen=True)
class Computed:
    """A stage that computes a record from stored inputs and changes nothing. The runtime answers from the ledger where
    it can; otherwise it runs `compute`, stores the record and commits it."""

    compute: Callable[[WorkerParts, Call], Output]


@dataclass(frozen=True)
class Settled:
    """A node that has its commit."""

    commit: Commit | None
    """None on ranks other than 0."""
    reused: bool
    """The commit was there already."""


@dataclass(frozen=True)
class SelfCommitting:
    """A stage that changes weights or gives them away: when it looks for its commit and when it writes it is part of
    what it does."""

    settle: Callable[[WorkerParts, Call], Settled]


Binding = Computed | SelfCommitting
