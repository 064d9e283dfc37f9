"""Rows that leave one engine and go on in another: what travels, and what an engine must do for it.

    source                                             target
    ──────                                             ──────
    migrate_out: out of the batch, between two batches
               callers keep waiting             ─────► migrate_in: into the batch (keys imported, or fed again)
               in the meantime: refit, sleep                      drawn on with the same noise
    deliver:   the caller gets its row          ◄───── (ticket, Completion) as each finishes
    give_back: the target is gone, the rows go on here

A migrated row's tokens and log-probs are the bits that it would have had at home: noise is keyed by the row, and keys
and values are copied, or computed again by kernels whose results depend on nothing but the row.

Not every engine can do this: `Capabilities.migration` says which, and the row's callers need not know
(`RowsLost` is all that they see of it). May import numpy, stages.engines.protocol and row_loads.
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
    """A row on its way: all that another engine needs to go on with it."""

    ticket: int
    """Names the row in the engine that gave it."""
    request: Request
    version: int
    """Weights that it goes on with."""
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
    """Owns rows that came from another engine, until they are finished."""

    def __iter__(self) -> Iterator[tuple[int, Completion | None]]:
        """(ticket, completion) of each as it finishes; None: it cannot be finished here after all. Raises RuntimeError
        if the engine stops."""
        ...

    def drop(self, tickets: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        ...

    def close(self) -> None:
        """Nobody waits for any of them."""
        ...


@runtime_checkable
class MigratableRows(Protocol):
    """An engine whose rows can migrate. All methods are thread-safe."""

    @property
    def num_calls_migrated(self) -> int:
        """Calls of `generate` (and `migrate_in`) whose unfinished rows are all elsewhere."""
        ...

    def watch_load(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        """From now on `listener` hears (in the engine's thread) of every change in the number of rows here while it is
        under `below`, and when it no longer is."""
        ...

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        """Takes rows out. Those that are not here (any more), that are nearly done, or whose caller went away are
        passed over. Until they are delivered or given back they do not count as in flight."""
        ...

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> IncomingRows:
        """Goes on with another engine's rows; without a free slot they wait. Raises RequestError, and takes none, for
        rows that it cannot serve: another version than the resident one, another model's keys, too long."""
        ...

    def deliver(self, ticket: int, completion: Completion) -> None:
        """A row that was given away is finished: its caller gets it, if it still waits."""
        ...

    def give_back(self, tickets: Collection[int]) -> None:
        """Rows that were given away go on here after all. Where their weights are gone their callers get RowsLost."""
        ...

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """Those of the given-away rows that somebody still waits for."""
        ...


def key_of(request: Request) -> RowKey:
    return request.seed, request.step, request.row
