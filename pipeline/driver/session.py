"""Context managers around a run: the lock, the signals, the boards of published weights, the worker processes.

    hold_driver_lock ──► handle_signals ──► published_weights ──► start_cluster ──► the run

The lock allows one process at a time in a directory of `runs_dir`: a run's driver, a reward model's training, or a
labelling.
"""

from __future__ import annotations

import errno
import logging
import signal
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from pipeline.config.memory import gpus_here, weights_bytes
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.attached_workers import AttachedWorkers
from pipeline.driver.cluster import Cluster, LocalWorkers
from pipeline.errors import ConfigError
from pipeline.workers.attached import board_of_host
from pipeline.workers.worker_process import TERMINAL_SIGNALS, ending_signals
from stages.models.protocol import Role
from stages.publish import is_published
from storage.errors import StoreError, StoreRefused
from storage.ledger import Ledger
from storage.locks import HeldByAnother, held
from storage.weights import WeightBoard

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Error numbers: the disk is full, the user's quota is used up, or the file system is read-only."""
_BLOCKING_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
"""Error numbers: no permission to write, or a file in place of a directory (or the reverse)."""


@contextmanager
def refuse_unwritable_directory(config: RunConfig) -> Iterator[None]:
    """Return a context for the first writes into a run's directory. The context raises ConfigError if a write fails
    because the disk is full, or because the directory cannot be written."""
    try:
        yield
    except StoreRefused as error:
        raise ConfigError("runs_dir", f"given {config.runs_dir!r}; {error}") from error
    except OSError as error:
        if error.errno not in DISK_FULL | _BLOCKING_ERRORS:
            raise
        where = f"cannot write {error.filename or 'there'}: {error.strerror}"
        need = f"{where}. Make room (or way), or give the right to write; what is committed stays"
        raise ConfigError("runs_dir", f"given {config.runs_dir!r}; {need}") from error


class TerminatedEarly(KeyboardInterrupt):
    """Interrupt of a job that must free its cluster nodes at once. Commits stay; no summary is made."""


@contextmanager
def handle_signals(immediate_signals: Collection[signal.Signals] = ()) -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt in the block, as Ctrl-C does. Ctrl-C also works if a shell
    started this process in the background with SIGINT ignored. Only the first SIGHUP counts, because a closed terminal
    sends one and its shell sends another.

    The signals in `immediate_signals` raise TerminatedEarly instead. Only the first of them counts, because a cluster's
    manager may send several to every process."""

    def interrupt(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def end(number: int, frame: object) -> None:
        for other in immediate_signals:
            signal.signal(other, signal.SIG_IGN)
        raise TerminatedEarly

    handlers = dict.fromkeys(ending_signals(), interrupt) | dict.fromkeys(immediate_signals, end)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def published_weights(config: RunConfig, ledger: Ledger) -> Iterator[WeightBoard | None]:
    """Yield the directory in shared memory in which the policy's gang publishes its weights. Rank 0 of this gang
    publishes them, and runs on the driver's host. Yield None if workers are attached, because all such directories are
    then on the workers' hosts.

    Before the block, remove leftovers:
    - weights that this run did not publish. A killed run of the same name leaves its weights in memory, even if its run
      directory was deleted.
    - directories of dead runs (`pipeline/workers/attached.py`)

    After the block, remove this run's directories on this host. Workers remove the directories on other hosts.
    """
    if config.cluster.kind == "attached":
        yield None
        return
    paths = RunPaths(config.run_dir)
    boards = {gang.name: WeightBoard(paths.board(config.weights_dir(gang.name))) for gang in config.gangs()}
    with ExitStack() as stack:
        for board in boards.values():
            stack.enter_context(board_of_host(board.directory))
            stack.enter_context(board)
        board = boards[config.placement.roles[Role.POLICY]]
        board.tidy(lambda manifest: is_published(ledger, manifest))
        yield board


@contextmanager
def start_cluster(config: RunConfig) -> Iterator[Cluster]:
    """Yield the run's cluster. Local workers are started while the terminal's signals are blocked, and inherit that
    signal mask. A terminal sends its signals to the whole process group, but only the driver must react to them: the
    driver then ends the workers."""
    logging.getLogger("distributed").setLevel(logging.ERROR)  # the executor reports losses itself
    if config.cluster.kind == "attached":
        with AttachedWorkers(config, weights_bytes(config)) as attached:
            yield attached
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        with LocalWorkers(config, gpus_here()) as workers:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield workers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def hold_driver_lock(paths: RunPaths) -> Iterator[None]:
    """Keep a second driver, on this host or another, out of the run's directory (`storage/locks.py`).

    Raises:
        ConfigError: another process is running the run, or the lock is another user's.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(held(paths.lock))
        except HeldByAnother as error:
            need = f"{error} is running {paths.root} now: wait for its end, or end it there"
            raise ConfigError("name", f"given {paths.root.name!r}; {need}") from error
        except StoreError as error:
            raise ConfigError("name", f"given {paths.root.name!r}; {error}") from error
        yield
