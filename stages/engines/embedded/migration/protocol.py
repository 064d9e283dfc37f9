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

May import numpy, stages.engines.protocol, stages.engines.embedded.rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from stages.engines.embedded.migration.load import EngineLoad, MigrationRequest, RowKey
from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.protocol import Completion, Request, RequestError


class RowsLost(RuntimeError):
    """Rows that were elsewhere came back unfinished, and the weights they need are not resident any more."""


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


def pack_row(row: Row, ticket: int, version: int, cache: np.ndarray | None) -> MigratedRow:
    """A row as it travels."""
    return MigratedRow(
        ticket=ticket,
        request=row.request,
        version=version,
        tokens=np.array(row.tokens[len(row.request.tokens) :], np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        versions=np.array(row.versions, np.int32),
        cache=cache,
    )


def unpack_row(migrated: MigratedRow, call: GenerateCall, eos_ids: Set[int]) -> Row:
    """The row that `pack_row` packed, without its blocks."""
    row = Row(migrated.request, call, eos_ids)
    for token, logprob, version in zip(
        migrated.tokens.tolist(), migrated.logprobs.tolist(), migrated.versions.tolist(), strict=True
    ):
        row.append(token, logprob, version)
    return row


def check_migrated(migrated: MigratedRow, version: int, cache_shape: tuple[int, int, int]) -> None:
    """Raises RequestError, naming the row, if this engine cannot go on with it. `cache_shape`: layers, key/value heads,
    head dimension."""
    problem = None
    layers, heads, dim = cache_shape
    if migrated.version != version:
        problem = f"goes on with version {migrated.version} of the weights; version {version} is resident"
    elif (
        not len(migrated.tokens)
        == len(migrated.logprobs)
        == len(migrated.versions)
        < migrated.request.sampling.max_new_tokens
    ):
        problem = f"arrives with {len(migrated.tokens)} tokens of {migrated.request.sampling.max_new_tokens}"
    elif migrated.cache is not None:
        positions = migrated.cache.shape[3] if migrated.cache.ndim == 5 else 0
        expected = (layers, 2, heads, positions, dim)
        if migrated.cache.shape != expected or not 0 < positions < migrated.num_tokens:
            problem = f"brings keys and values of shape {migrated.cache.shape}; here they are {expected}"
    if problem is not None:
        raise RequestError(f"row {migrated.request.row} {problem}")
