"""Score rows while other rows of their shard are still generated, if a reward is slow (`Reward.early`).

    driver ──"send the rows of generate[i,s] to W"──► replica of the engine
                                                        │ each finished row, over a Dask connection
                                                        ▼
                                                      W, the worker that will score the shard: scores the row at once
    the shard is committed ──► score[i,s] runs on W ──► takes the scores of the rows that it knows, scores the rest

The graph and the commits stay the same: a row's score does not depend on when it was asked for. No node waits for these
messages. If one is lost, or a worker dies, `score[i,s]` scores the row.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from distributed import Worker

from pipeline.workers.orders import accept_row_orders
from stages.rewards.protocol import Part, Sample
from stages.score import RowScores, score_early
from storage.address import Address
from storage.records import Rollout

ACCEPT = "stageline_accept_row"
"""Name of the Dask handler that takes a row."""
_MAX_SHARDS = 256
"""Number of shards that a worker remembers. Orders and rows of older shards are forgotten: their nodes are done, or run
on another worker."""


# ---- the generating replica --------------------------------------------------------------------------------------


@dataclass
class _Sending:
    """A shard whose rows are sent. Used by the event loop's thread only."""

    target: str | None = None
    """Dask address of the worker that gets the rows; None until the driver's order arrives."""
    refused: bool = False
    """True if the target does not want rows, or did not answer."""
    rows: list[bytes] = field(default_factory=list)
    """Rows that wait for the order."""


class RowSender:
    """Sends finished rows to the workers that will score them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._shards: OrderedDict[Address, _Sending] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        accept_row_orders(worker, self._on_order)

    def send(self, shard: Address, row: Rollout) -> None:
        """Send a finished row of a shard, given as a rollout of one row. Does not wait."""
        message = pickle.dumps(row)
        self._worker.loop.add_callback(self._add, shard, message)

    def forget(self, shard: Address) -> None:
        """Forget the rows of a shard for which no order has come. The shard is complete, or its attempt has failed."""
        self._worker.loop.add_callback(self._shards.pop, shard, None)

    def _on_order(self, shard: Address, target: str) -> None:
        sending = self._sending(shard)
        sending.target, sending.refused = target, False
        rows, sending.rows = sending.rows, []
        for row in rows:
            self._start(shard, sending, row)

    def _add(self, shard: Address, row: bytes) -> None:
        sending = self._sending(shard)
        if sending.target is None:
            sending.rows.append(row)
        else:
            self._start(shard, sending, row)

    def _sending(self, shard: Address) -> _Sending:
        sending = self._shards.setdefault(shard, _Sending())
        while len(self._shards) > _MAX_SHARDS:
            self._shards.popitem(last=False)
        return sending

    def _start(self, shard: Address, sending: _Sending, row: bytes) -> None:
        async def send() -> None:
            try:
                answer = await getattr(self._worker.rpc(sending.target), ACCEPT)(shard=pickle.dumps(shard), row=row)
            except (OSError, AttributeError):  # the process has died, or was restarted and is not built yet
                answer = False
            sending.refused |= not answer

        if not sending.refused:
            task = asyncio.create_task(send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


# ---- the scoring worker ------------------------------------------------------------------------------------------


class EarlyScorer:
    """Owns the thread that scores rows as they arrive, and their scores until the row's shard is scored.

    The rewards are asked by one thread at a time. A node that scores a shard goes before rows that wait."""

    def __init__(
        self, parts_of: Callable[[Address], Sequence[Part]], samples_of: Callable[[Rollout], list[Sample]]
    ) -> None:
        """`parts_of`: returns the parts of the reward that scores a shard of this address. `samples_of`: returns the
        rows of a rollout as samples."""
        self._parts_of, self._samples_of = parts_of, samples_of
        self._asking = threading.Lock()
        """Held by the thread that calls the rewards."""
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._arrived: list[tuple[Address, Rollout]] = []
        self._scores: OrderedDict[Address, dict[int, RowScores]] = OrderedDict()
        self._waiting_nodes = 0
        self._errors: list[Exception] = []
        """Errors of calls for which nodes wait, or waited last."""
        self._closed = False
        self._thread = threading.Thread(target=self._score_arrivals, name="early-scores", daemon=True)
        self._thread.start()

    def open(self, worker: Worker) -> None:
        """Let other processes send rows to this one."""

        async def accept(shard: bytes, row: bytes) -> bool:
            return self.accept(pickle.loads(shard), pickle.loads(row))

        worker.handlers[ACCEPT] = accept

    def accept(self, shard: Address, row: Rollout) -> bool:
        """Take a row that will be scored soon. Return False if no part of the reward is `early`."""
        if not any(part.reward.early for part in self._parts_of(shard)):
            return False
        with self._changed:
            self._arrived.append((shard, row))
            self._changed.notify()
        return True

    @contextmanager
    def scores_of(self, shard: Address) -> Iterator[dict[int, RowScores]]:
        """Yield the scores of the rows that were scored early: number of a row -> its scores. Nobody else asks the
        rewards inside the `with` block. Rows of this shard that still wait are dropped.

        Raises the error of a call for which the node waited. A judge that answers nothing for `retry_s` thus keeps the
        node from its deadline once, and not twice."""
        with self._changed:
            if not self._waiting_nodes:
                self._errors.clear()
            self._waiting_nodes += 1
        try:
            with self._asking:
                with self._changed:
                    self._arrived = [one for one in self._arrived if one[0] != shard]
                    scores = self._scores.pop(shard, {})
                    if self._errors:
                        raise self._errors[0]
                yield scores
        finally:
            with self._changed:
                self._waiting_nodes -= 1
                self._changed.notify()

    def close(self) -> None:
        """End the thread. A call of a reward that runs is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _score_arrivals(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._arrived and not self._waiting_nodes))
                if self._closed:
                    return
            with self._asking:
                with self._changed:
                    arrived, self._arrived = self._arrived, []
                try:
                    for shard in dict.fromkeys(shard for shard, _ in arrived):
                        self._score(shard, [row for its, row in arrived if its == shard])
                except Exception as error:
                    # Nodes score these rows again, and report what is wrong with them.
                    traceback.print_exc()
                    with self._changed:
                        self._errors = [error]

    def _score(self, shard: Address, rows: Sequence[Rollout]) -> None:
        samples = [sample for row in rows for sample in self._samples_of(row)]
        scored = score_early(self._parts_of(shard), samples)
        with self._changed:
            self._scores.setdefault(shard, {}).update((one.sample.row, one) for one in scored)
            while len(self._scores) > _MAX_SHARDS:
                self._scores.popitem(last=False)
