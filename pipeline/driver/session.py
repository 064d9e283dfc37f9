"""What is around a run while it goes on: the lock, the signals, the worker processes, the boards of published weights.

    only_driver ──► interruptible ──► published_weights ──► worker_processes ──► the run

May import torch (to count GPUs) and all of pipeline below the command line.
"""

from __future__ import annotations

import errno
import logging
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker

import torch

from pipeline.config.errors import ConfigError
from pipeline.config.host_limits import weights_bytes
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.attached_workers import AttachedWorkers
from pipeline.driver.cluster import Cluster
from pipeline.driver.local_workers import LocalWorkers
from stages.models.protocol import Role
from stages.publish import is_published
from storage.errors import StoreRefused
from storage.ledger import Ledger
from storage.weights import WeightBoard

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Of an OSError: the disk is full, or the user's share of it, or it cannot be written any more."""
_IN_THE_WAY = frozenset({errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
"""There is no right to write, or a file where a directory must be."""


@contextmanager
def writable(config: RunConfig) -> Iterator[None]:
    """Around the first writes into a run's directory. Raises ConfigError where they cannot be made."""
    try:
        yield
    except StoreRefused as error:
        raise ConfigError("runs_dir", f"given {config.runs_dir!r}; {error}") from error
    except OSError as error:
        if error.errno not in DISK_FULL | _IN_THE_WAY:
            raise
        where = f"cannot write {error.filename or 'there'}: {error.strerror}"
        need = f"{where}. Make room (or way), or give the right to write; what is committed stays"
        raise ConfigError("runs_dir", f"given {config.runs_dir!r}; {need}") from error


class EndedEarly(KeyboardInterrupt):
    """Whoever runs the job wants its nodes back, now: what is committed stays, and nothing is made of it."""


@contextmanager
def interruptible(at_once: Collection[signal.Signals] = ()) -> Iterator[None]:
    """SIGTERM interrupts like Ctrl-C; and Ctrl-C does so also where a shell started this process in the background,
    with SIGINT ignored. Those that are to end it `at_once` raise EndedEarly instead, of which the first alone counts: a
    cluster's manager may send several, to every process."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def end(number: int, frame: object) -> None:
        for other in at_once:
            signal.signal(other, signal.SIG_IGN)
        raise EndedEarly

    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT), interrupt) | dict.fromkeys(at_once, end)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def published_weights(config: RunConfig, ledger: Ledger) -> Iterator[WeightBoard | None]:
    """The board of published weights, which is that of the policy's gang (the driver runs on the host of its rank 0),
    less what is not this run's: a killed run whose directory was removed leaves its weights in memory under the same
    name. In the end all boards of this host go; those of other hosts are removed by their workers. None where workers
    are attached, which have all boards on their hosts."""
    if config.cluster.kind == "attached":
        yield None
        return
    paths = RunPaths(config.run_dir)
    boards = {gang.name: WeightBoard(paths.board(config.weights_dir(gang.name))) for gang in config.gangs()}
    with ExitStack() as stack:
        for board in boards.values():
            stack.enter_context(board)
        board = boards[config.placement.roles[Role.POLICY]]
        board.tidy(lambda manifest: is_published(ledger, manifest))
        yield board


@contextmanager
def worker_processes(config: RunConfig) -> Iterator[Cluster]:
    """The run's cluster. Local worker processes are not reached by Ctrl-C: a terminal sends it to the whole process
    group, but only the driver is to answer it, and to end them. They inherit the mask of the thread that starts
    them."""
    logging.getLogger("distributed").setLevel(logging.ERROR)  # the executor says what is lost, in the run's words
    if config.cluster.kind == "attached":
        with AttachedWorkers(config, weights_bytes(config)) as attached:
            yield attached
        return
    sys.warnoptions.append("ignore:resource_tracker")  # it cleans up after killed workers; it need not say so
    resource_tracker.ensure_running()  # starting it later would lift the mask
    sys.warnoptions.pop()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with LocalWorkers(config, torch.cuda.device_count()) as workers:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield workers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
