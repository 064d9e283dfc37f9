"""Who has joined an attached run, and who may: the scheduler's side of `pipeline/workers/joining.py`.

    JoinRequest ──► a worker of this run? not there yet? ──► its host fit? ──► GPUs that nobody has ──► joined
                          │ no: refused, and nobody else hears of it │ no: refused, and the executor hears of it

Everything here runs in the scheduler's thread. May import pipeline.config, pipeline.graph, pipeline.workers.{joining,
messages, scheduler_file} and storage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pipeline.config.devices import Worker, devices_of_joining
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.graph.gangs import Gang
from pipeline.workers.joining import JoinRefused, JoinRequest, versions_here
from pipeline.workers.messages import worker_name
from pipeline.workers.scheduler_file import SchedulerFile
from stages.models.protocol import Role
from storage import files
from storage.errors import StoreError

_SEEN_WITHIN_S = 10.0
"""For what a worker's host wrote to be seen here."""
_LOOK_S = 0.1
GIB = 1 << 30


class Connection(Protocol):
    """What is used of a connection of Dask's."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> Any: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class _Joined:
    """A worker that has joined, while its connection is open."""

    connection: Connection
    request: JoinRequest
    gpus: tuple[str, ...]
    """Identities of those that it was given."""


class Roster:
    """Owns the connections of the workers that have joined."""

    def __init__(
        self, config: RunConfig, file: SchedulerFile, board_bytes: int, report: Callable[[dict[str, Any]], None]
    ) -> None:
        """`board_bytes`: of all versions of the weights that a host may have published at once. `report` is given each
        refusal."""
        self._config = config
        self._file = file
        self._board_bytes = board_bytes
        self._report = report
        self._gangs = {gang.name: gang for gang in config.gangs()}
        self._joined: dict[Worker, _Joined] = {}

    async def serve(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answers a request, and, where the worker joins, returns when its connection ends."""
        now = time.time()
        try:
            request = JoinRequest.of(message)
        except TypeError as error:
            await self._refuse(connection, self._of_other_version(message, error))
            return
        refused = self._stranger(request.gang, request.index, request.host)
        if refused is None:
            worker = request.gang, request.index
            unfit = [*host_problems(request, self._config, now, versions_here(), self._board_bytes_of(request))]
            unfit += [] if unfit else await self._directory_problems(request)
            gpus = self._gpus_for(request)
            unfit += [gpus] if isinstance(gpus, str) else []
            refused = self._stranger(*worker, request.host)  # another may have come meanwhile
            if refused is None and unfit:
                refused = JoinRefused(*worker, f"host {request.host}: {unfit[0]}", fatal=True)
        if refused is not None:
            await self._refuse(connection, refused)
            return
        assert not isinstance(gpus, str)
        self._joined[worker] = _Joined(connection, request, tuple(request.gpus[index] for index in gpus))
        try:
            await connection.write({"devices": list(gpus)})
            while True:
                await connection.read()  # nothing is said here; the end is what it is for
        except OSError:
            pass
        finally:
            if self._joined[worker].connection is connection:
                del self._joined[worker]

    async def end(self, why: str) -> None:
        """Has every worker end, with all that it started."""
        for joined in list(self._joined.values()):
            with suppress(OSError):
                await joined.connection.write({"over": why})

    async def _refuse(self, connection: Connection, refused: JoinRefused) -> None:
        self._report(asdict(refused))
        with suppress(OSError):
            await connection.write({"refused": refused.text})

    def _of_other_version(self, message: Mapping[str, Any], error: TypeError) -> JoinRefused:
        """Of a worker that does not say what one of this version says."""
        gang, index, host = str(message.get("gang")), message.get("index"), message.get("host")
        index, versions = index if isinstance(index, int) else -1, message.get("versions")
        differ = version_problems(versions if isinstance(versions, dict) else {}, versions_here())
        why = next(differ, f"its request is none of this version of Stageline: {error}")
        stranger = self._stranger(gang, index, str(host))
        return stranger or JoinRefused(gang, index, f"host {host}: {why}", fatal=True)

    def _stranger(self, name: str, index: int, host: str) -> JoinRefused | None:
        """Why a worker of a gang of that name, on that host, is none that the run is waiting for."""
        gang, text = self._gangs.get(name), None
        if gang is None:
            text = f"host {host}: the run has no gang {name!r}; it has {', '.join(sorted(self._gangs))}"
        elif not 0 <= index < gang.workers:
            text = f"host {host}: gang {name} has no index {index}; it has 0 to {gang.workers - 1}"
        elif (name, index) in self._joined:
            there = self._joined[name, index].request
            who = worker_name(name, index)
            text = f"host {host}: {who} is there already: process {there.process} on host {there.host}"
        return None if text is None else JoinRefused(name, index, text, fatal=False)

    def _board_bytes_of(self, request: JoinRequest) -> int:
        """What must fit into the shared memory of this worker's host."""
        return 0 if self._gangs[request.gang].roles.isdisjoint({Role.GENERATE, Role.POLICY}) else self._board_bytes

    def _gpus_for(self, request: JoinRequest) -> tuple[int, ...] | str:
        gang = self._gangs[request.gang]
        alike = next((one.request for (name, _), one in self._joined.items() if name == gang.name), None)
        if alike is not None and bool(alike.gpus) != bool(request.gpus) and needs_gpus(gang):
            some = "sees GPUs" if request.gpus else "sees no GPU"
            return f"it {some}, unlike {worker_name(alike.gang, alike.index)} on host {alike.host}"
        placement, ranks = self._config.placement, self._config.replica_ranks
        share, turns = placement.share_devices, placement.turns
        return devices_of_joining(gang, ranks, request.gpus, self._taken(), share=share, turns=turns)

    def _taken(self) -> Mapping[str, list[Worker]]:
        taken: dict[str, list[Worker]] = {}
        for worker, joined in self._joined.items():
            for gpu in joined.gpus:
                taken.setdefault(gpu, []).append(worker)
        return taken

    async def _directory_problems(self, request: JoinRequest) -> list[str]:
        """Whether what the worker wrote can be read here."""
        root = files.open_root(str(RunPaths(self._config.run_dir).attached))
        give_up = time.monotonic() + _SEEN_WITHIN_S
        while True:
            try:
                found = await asyncio.to_thread(files.read, root, request.wrote)
                if found is not None and found.decode() == self._file.nonce:
                    await asyncio.to_thread(files.remove, root, request.wrote)
                    return []
            except (OSError, StoreError) as error:
                return [f"what it wrote to the run's directory cannot be read: {error}"]
            if time.monotonic() > give_up:
                return [
                    f"what it wrote to {self._file.run_dir} was not seen by the driver's host within "
                    f"{_SEEN_WITHIN_S:g} s: both must mount the same filesystem"
                ]
            await asyncio.sleep(_LOOK_S)


def needs_gpus(gang: Gang) -> bool:
    """Whether a gang's workers compute on GPUs where there are any."""
    return gang.ordered or Role.GENERATE in gang.roles


def host_problems(
    request: JoinRequest, config: RunConfig, now: float, versions: Mapping[str, str], board_bytes: int
) -> Iterator[str]:
    """What of a worker's host does not fit the run. `now`: the driver's clock; `versions`: what it has; `board_bytes`:
    what published weights will take there."""
    yield from version_problems(request.versions, versions)
    if request.shared:
        yield request.shared
    skew = request.clock - now
    if abs(skew) > config.cluster.clock_skew_s:
        side = "ahead of" if skew > 0 else "behind"
        yield (
            f"its clock is {abs(skew):.1f} s {side} the driver's, and cluster.clock_skew_s is "
            f"{config.cluster.clock_skew_s:g}: set it by NTP"
        )
    if request.board_free < board_bytes:
        yield (
            f"published weights will take {board_bytes / GIB:.2f} GiB (staleness + 2 versions) and its shared memory "
            f"has {request.board_free / GIB:.2f}: make /dev/shm larger, or set cluster.weights_dir"
        )


def version_problems(theirs: Mapping[str, object], ours: Mapping[str, str]) -> Iterator[str]:
    """What a worker's host has in another version than the driver, by package."""
    differ = [
        f"{name} {theirs.get(name)} (the driver: {ours[name]})" for name in ours if theirs.get(name) != ours[name]
    ]
    if differ:
        yield f"it has other versions than the driver: {'; '.join(differ)}. Use one environment on all hosts"
