"""A pytest plugin that fails what leaves something open.

After each module of tests the process that ran it must hold no more than before: no more descriptors of any kind, no
more child processes, no more mapped files of shared memory. After the whole suite nothing new may stand in shared
memory that no living process uses: semaphores (`sem.mp-...`) and boards of weights of processes that were killed.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest

from storage.weights import owner_alive
from tests.support.processes import command_line

SHARED_MEMORY = Path("/dev/shm")
_ENDS_S = float(os.environ.get("STAGELINE_LEAKS_END_S", "30"))
"""Longest wait for processes that are about to end, and for what multiprocessing then removes. The tests of this plugin
shorten it where something is left for good."""


def pytest_configure(config: pytest.Config) -> None:
    # In the only process, or the one that has others run the tests. Not in a suite that a test starts beside others.
    if not hasattr(config, "workerinput") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(AfterTheSuite())


@pytest.fixture(scope="module", autouse=True)
def _closes_what_it_opens(request: pytest.FixtureRequest) -> Iterator[None]:
    before = Opened.now()
    yield
    left = before.left_since()
    if left:
        pytest.fail("\n  ".join([f"{request.node.nodeid} left open:", *left]), pytrace=False)


class AfterTheSuite:
    """The suite's last look: what stands in shared memory now, did not before, and belongs to nobody."""

    def __init__(self) -> None:
        self._before = frozenset(os.listdir(SHARED_MEMORY))
        self._ran: dict[str, tuple[float, float]] = {}
        """When each module began and ended."""
        self._left: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module = report.nodeid.partition("::")[0]
        begun, ended = self._ran.get(module, (report.start, report.stop))
        self._ran[module] = min(begun, report.start), max(ended, report.stop)

    @pytest.hookimpl(trylast=True)  # when the processes that ran the tests have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        _end_helpers()
        left = _in_the_end(lambda: abandoned(set(os.listdir(SHARED_MEMORY)) - self._before))
        # What was made while no test ran here is of somebody else: another suite, or a run of this account.
        self._left = [f"{name}, made during {', '.join(at)}" for name, made in left if (at := self._modules_at(made))]
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.section(f"{len(self._left)} left in {SHARED_MEMORY}, used by no process", red=True)
            terminalreporter.write("".join(f"{line}\n" for line in self._left))
            terminalreporter.write("(or by something else that this account ran at that time, and that was killed)\n")

    def _modules_at(self, when: float) -> list[str]:
        return [module for module, (begun, ended) in self._ran.items() if begun - 1 <= when <= ended + 1]


@dataclass(frozen=True)
class Opened:
    """Resources that this process holds at one time."""

    descriptors: dict[int, str]
    """Target by number, as /proc/self/fd has it: a path, `socket:[1234]`, `anon_inode:[eventpoll]`."""
    children: dict[psutil.Process, str]
    """The command of each process that descends from this one."""
    mapped: frozenset[str]
    """Names in shared memory that this process has mapped."""

    @classmethod
    def now(cls) -> Opened:
        kept = _kept_descriptors()
        return cls(
            {number: target for number, target in _descriptors() if number not in kept and not _is_kept_file(target)},
            {
                child: command_line(child)
                for child in psutil.Process().children(recursive=True)
                if not _is_kept_child(child)
            },
            frozenset(mapped_names("self")),
        )

    def left_since(self) -> list[str]:
        """Return a line for each thing that was opened since and is still open."""

        def found() -> list[str]:
            now = Opened.now()
            new = self._new_children(now)
            psutil.wait_procs(new, _ENDS_S)
            return list(self._more(Opened.now() if new else now))

        if found():
            _close_mlflow()
            gc.collect()  # closes what only a cycle of references holds: by itself the collector comes when it likes
        return found()

    def _more(self, now: Opened) -> Iterator[str]:
        before, after = (Counter(map(_kind, opened.descriptors.values())) for opened in (self, now))
        for number, target in now.descriptors.items():
            if after[_kind(target)] > before[_kind(target)] and self.descriptors.get(number) != target:
                yield f"descriptor {number}: {_named(number, target)}"
        for child in self._new_children(now):
            with suppress(psutil.NoSuchProcess):
                yield f"process {child.pid} ({child.status()}): {now.children[child][:200]}"
        for name in sorted(now.mapped - self.mapped):
            yield f"shared memory: {name}"

    def _new_children(self, now: Opened) -> list[psutil.Process]:
        """Return the processes that were started since. A process that took the place of one with the same command,
        such as a daemon that was restarted, does not count."""
        more = Counter(now.children.values()) - Counter(self.children.values())
        return [one for one, command in now.children.items() if one not in self.children and more[command]]


def abandoned(names: Collection[str]) -> list[tuple[str, float]]:
    """Return those of these entries of shared memory that are this account's and that no living process uses, and the
    time that each was made at."""
    processes = filter(str.isdigit, os.listdir("/proc")) if names else ()
    used = {name for process in processes for name in mapped_names(process)}
    found = []
    for path in (SHARED_MEMORY / name for name in sorted(set(names).difference(used))):
        with suppress(FileNotFoundError):  # it has gone meanwhile
            status = path.lstat()
            if status.st_uid == os.getuid() and not (path.is_dir() and any(map(owner_alive, path.iterdir()))):
                found.append((path.name, status.st_mtime))
    return found


def _in_the_end(left: Callable[[], list[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Return what is left when nothing is, or when the processes that may still remove it had their time."""
    give_up = time.monotonic() + _ENDS_S
    while (found := left()) and time.monotonic() < give_up:
        time.sleep(0.1)
    return found


def mapped_names(process: str) -> set[str]:
    """Return the entries of shared memory that a process has mapped; none if it has ended or is another account's.

    They are found by their inodes: a semaphore is mapped under a name that it no longer has."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return set()
    inodes = set(map(int, re.findall(rf"(\d+) +{SHARED_MEMORY}/", maps)))
    return {name for name, inode in _entries() if inode in inodes} if inodes else set()


def _entries() -> Iterator[tuple[str, int]]:
    """Yield the entries of shared memory, each with its inode and with those of the files in it."""
    for path in SHARED_MEMORY.iterdir():
        with suppress(OSError):  # it has gone meanwhile, or is another account's
            yield path.name, path.lstat().st_ino
            for inside in path.iterdir() if path.is_dir() else ():
                yield path.name, inside.lstat().st_ino


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _kind(target: str) -> str:
    """Return a target without its number."""
    return re.sub(r":\[\d+\]$", "", target)


def _named(number: int, target: str) -> str:
    """Return a target, with a socket's addresses."""
    for connection in psutil.Process().net_connections("all") if target.startswith("socket:") else ():
        if connection.fd == number:
            return f"{target} {connection.status} {connection.laddr} -> {connection.raddr}"
    return target


def _kept_descriptors() -> set[int | None]:
    """Return the descriptors that a library keeps once per process, until it ends:

    - multiprocessing the pipes to its resource tracker and to its fork server;
    - zarr and fsspec an event loop each, in a thread."""
    kept = {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}
    for library in ("zarr.core.sync", "fsspec.asyn"):
        loop = sys.modules[library].loop[0] if library in sys.modules else None
        if loop is not None:
            kept |= {loop._selector.fileno(), loop._ssock.fileno(), loop._csock.fileno()}
    return kept


def _is_kept_file(target: str) -> bool:
    """Return True for the fonts that matplotlib keeps open once it has drawn with them."""
    return "/mpl-data/fonts/" in target


def _is_kept_child(child: psutil.Process) -> bool:
    """Return True for multiprocessing's helpers, of which a process has one each until it ends."""
    return child.pid in (resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid)


def _end_helpers() -> None:
    """End multiprocessing's helpers of this process, if there are any and no child of theirs is left: the resource
    tracker then removes the semaphores of processes that were killed, as it does whenever a driver ends."""
    if all(map(_is_kept_child, psutil.Process().children(recursive=True))):
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()


def _close_mlflow() -> None:
    """Close the connections that MLflow's client keeps for each database and each server it has seen: it has no call
    for that."""
    if requests := sys.modules.get("mlflow.utils.request_utils"):
        requests._cached_get_request_session.cache_clear()
    for part in ("tracking", "model_registry"):
        module = sys.modules.get(f"mlflow.store.{part}.sqlalchemy_store")
        for engine in module.SqlAlchemyStore._engine_map.values() if module else ():
            engine.dispose()
