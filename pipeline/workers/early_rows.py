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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
        _keep_newest(self._shards)
        return sending

    def _start(self, shard: Address, sending: _Sending, row: bytes) -> None:
        async def send() -> None:
            try:
                answer = await getattr(self._worker.rpc(sending.target), ACCEPT)(shard=pickle.dumps(shard), row=row)
            except Exception:  # the process has died, or is not built yet; nothing depends on the row
                answer = False
            sending.refused |= not answer

        if not sending.refused:
            task = asyncio.create_task(send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


# ---- the scoring worker ------------------------------------------------------------------------------------------


class EarlyScorer:
    """Owns the calls that score rows as they arrive, each in a thread, and the scores until the row's shard is scored.

    A call has the rows of one shard that have arrived since the last call. If the rewards allow it, several calls run
    at once (`Reward.concurrent_calls`). A node that scores a shard counts as one of them."""

    def __init__(
        self,
        parts_of: Callable[[Address], Sequence[Part]],
        samples_of: Callable[[Rollout], list[Sample]],
        concurrent_calls: int,
    ) -> None:
        """`parts_of`: returns the parts of the reward that scores a shard of this address. `samples_of`: returns the
        rows of a rollout as samples."""
        self._parts_of, self._samples_of, self._max_calls = parts_of, samples_of, concurrent_calls
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._arrived: OrderedDict[Address, list[Rollout]] = OrderedDict()
        self._calls: Counter[Address] = Counter()
        """Shard -> number of calls that run."""
        self._scores: OrderedDict[Address, dict[int, RowScores]] = OrderedDict()
        self._errors: OrderedDict[Address, BaseException] = OrderedDict()
        """Shard -> error of its last call."""
        self._nodes = 0
        """Number of nodes that score a shard at the moment."""
        self._begun: OrderedDict[Address, None] = OrderedDict()
        """The last shards whose node has begun. Rows that arrive later are refused."""
        self._closed = False

    def open(self, worker: Worker) -> None:
        """Let other processes send rows to this one."""

        async def accept(shard: bytes, row: bytes) -> bool:
            return self.accept(pickle.loads(shard), pickle.loads(row))

        worker.handlers[ACCEPT] = accept

    def scores(self, shard: Address) -> bool:
        """Return True if any part of the reward that scores this shard is `early`."""
        return any(part.reward.early for part in self._parts_of(shard))

    def accept(self, shard: Address, row: Rollout) -> bool:
        """Take a row that will be scored soon. Return False if no part of the reward is `early`, or if the shard's node
        has begun."""
        if not self.scores(shard):
            return False
        with self._changed:
            if self._closed or shard in self._begun:
                return False
            self._arrived.setdefault(shard, []).append(row)
            self._begin_calls()
        return True

    @contextmanager
    def scores_of(self, shard: Address) -> Iterator[dict[int, RowScores]]:
        """Yield the scores of the rows that were scored early: number of a row -> its scores. Calls for this shard that
        run are waited for. Its rows that still wait are dropped.

        Raises the error of a call that was waited for. So a judge that answers nothing for `retry_s` keeps the node
        from its deadline once, and not twice."""
        with self._changed:
            self._nodes += 1
            self._begun[shard] = None
            _keep_newest(self._begun)
            self._arrived.pop(shard, None)
            self._errors.pop(shard, None)
            self._changed.wait_for(lambda: not self._calls[shard] and self._calls.total() < self._max_calls)
            error, scores = self._errors.pop(shard, None), self._scores.pop(shard, {})
        try:
            if error is not None:
                raise error
            yield scores
        finally:
            with self._changed:
                self._nodes -= 1
                self._begin_calls()

    def close(self) -> None:
        """Begin no more calls. A call that runs is not waited for."""
        with self._changed:
            self._closed = True
            self._arrived.clear()

    def _may_call(self) -> bool:
        return bool(self._arrived) and self._calls.total() + self._nodes < self._max_calls

    def _begin_calls(self) -> None:
        """Begin as many calls as may run now. The caller holds the lock."""
        while self._may_call():
            shard, rows = self._arrived.popitem(last=False)
            self._calls[shard] += 1
            threading.Thread(target=self._call, args=(shard, rows), name="early-scores", daemon=True).start()

    def _call(self, shard: Address, rows: Sequence[Rollout]) -> None:
        scored: list[RowScores] = []
        error: BaseException | None = None
        try:
            scored = score_early(self._parts_of(shard), [s for row in rows for s in self._samples_of(row)])
        except BaseException as raised:
            traceback.print_exc()  # the node scores these rows again, and reports what is wrong with them
            error = raised
        with self._changed:
            self._calls[shard] -= 1
            if not self._calls[shard]:
                del self._calls[shard]
            self._scores.setdefault(shard, {}).update((one.sample.row, one) for one in scored)
            _keep_newest(self._scores)
            if error is not None:
                self._errors[shard] = error
                _keep_newest(self._errors)
            self._begin_calls()
            self._changed.notify_all()


def _keep_newest(of_shards: OrderedDict[Address, Any]) -> None:
    """Forget the oldest shards above `_MAX_SHARDS`."""
    while len(of_shards) > _MAX_SHARDS:
        of_shards.popitem(last=False)
