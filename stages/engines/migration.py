"""Rows that leave one engine and continue in another: their record, and the methods of an engine that can do this.

    source                                             target
    ──────                                             ──────
    migrate_out: removes rows between two batches
                 callers keep waiting           ─────► migrate_in: adds them (keys imported, or computed again),
                 the engine may refit or sleep                     sampled with the same noise
    deliver:     returns a row to its caller    ◄───── (ticket, Completion) as each finishes
    give_back:   the target is lost, the rows continue here

A migrated row's tokens and log-probs have the same bits as without the migration: noise is keyed by the row, and keys
and values are copied, or computed again by kernels whose results depend only on the row.

`Capabilities.migration` says which engines can do this. The callers of the rows notice nothing, apart from `RowsLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from stages.engines.protocol import Completion, Request
from stages.engines.row_loads import EngineLoad, MigrationRequest, RowKey


@dataclass(frozen=True, eq=False)
class MigratedRow:
    """Everything that another engine needs to continue a row."""

    ticket: int
    """The row's number in the engine that it left."""
    request: Request
    version: int
    """Version of the weights to continue with."""
    tokens: Int32[np.ndarray, " new"]
    """Sampled so far."""
    logprobs: Float32[np.ndarray, " new"]
    versions: Int32[np.ndarray, " new"]
    cache: Float32[np.ndarray, "layers 2 kv_heads positions dim"] | None
    """Keys and values of the first positions, in no engine's own layout; None: it is to be fed again."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.request.tokens) + len(self.tokens)


class IncomingRows(Protocol):
    """Owns rows from another engine until they are finished."""

    def __iter__(self) -> Iterator[tuple[int, Completion | None]]:
        """Yield (ticket, completion) as each row finishes; None if it cannot be finished here after all. Raises
        RuntimeError if the engine stops."""
        ...

    def drop(self, tickets: Iterable[int]) -> None:
        """Stop these rows: their callers have left."""
        ...

    def close(self) -> None:
        """Stop all rows."""
        ...


@runtime_checkable
class MigratableRows(Protocol):
    """The methods of an engine whose rows can migrate. All are thread-safe."""

    @property
    def num_calls_migrated(self) -> int:
        """Number of calls of `generate` and `migrate_in` whose unfinished rows are all in other engines."""
        ...

    def watch_load(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        """Call `listener` in the engine's thread at each change of the number of rows here while it is under `below`,
        and when it reaches `below` again."""
        ...

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        """Take rows out. Skips rows that are not here, are nearly done, or have lost their caller. The rows do not
        count as in flight until they are delivered or given back."""
        ...

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> IncomingRows:
        """Continue another engine's rows; they wait for free slots. Raises RequestError, and takes none, if a row needs
        another version, has another model's keys, or is too long."""
        ...

    def deliver(self, ticket: int, completion: Completion) -> None:
        """Return a finished row that was taken out to its caller, if the caller still waits."""
        ...

    def give_back(self, tickets: Collection[int]) -> None:
        """Continue rows that were taken out. If their weights are gone, their callers get RowsLost."""
        ...

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """Return the rows that were taken out and whose callers still wait."""
        ...


def key_of(request: Request) -> RowKey:
    """Return the row's key."""
    return request.seed, request.step, request.row
