"""An attached run as commands of their own: a driver, and `stageline worker` processes, each with a process group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.workers.scheduler_file import file_of_driver, newest_driver
from tests.support.waiting import TIMEOUT_S

_WITH_RUNTIME = """
import sys
import pytest
from pipeline.cli.main import main
from tests.support.runs import use_runtime
use_runtime(pytest.MonkeyPatch(), sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""

ATTACHED = ("cluster.kind=attached", "cluster.address=127.0.0.1", "cluster.arrival_timeout_s=300")


class Commands:
    """Owns the processes that it starts."""

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        """`folder`: for what they print. `prefix`: begins each command, where they run elsewhere than here."""
        self.folder = folder
        self.prefix = tuple(prefix)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, *arguments: str, prefix: Sequence[str] | None = None, runtime: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `stageline ARGUMENTS` in a process group of its own. Its output goes to the end of NAME.log. `runtime`:
        the driver builds its workers with this one (`module:Class`)."""
        # a gang of one host in this process has bound itself to loopback; the command's gang may span hosts
        here = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
        environment = here | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "300"}
        before = self.prefix if prefix is None else prefix
        program = ("-m", "pipeline.cli") if runtime is None else ("-c", _WITH_RUNTIME, runtime)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*before, sys.executable, *program, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started[name] = process
        return process

    def worker(self, config: RunConfig, gang: str, index: int = 0, *more: str) -> subprocess.Popen[bytes]:
        where = (str(config.run_dir), "--gang", gang, "--index", str(index))
        return self.start(f"{gang}-{index}", "worker", *where, *more)

    def workers(self, config: RunConfig) -> None:
        """All of the run's."""
        for gang in config.gangs():
            for index in range(gang.workers):
                self.worker(config, gang.name, index)

    def exit_code(self, name: str, timeout_s: float = TIMEOUT_S) -> int:
        return self.started[name].wait(timeout_s)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill_group(self, name: str, number: int = signal.SIGKILL) -> None:
        os.killpg(self.started[name].pid, number)

    def close(self) -> None:
        for process in self.started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def commands(folder: Path) -> Iterator[Commands]:
    owned = Commands(folder)
    try:
        yield owned
    finally:
        owned.close()


def scheduler_file(config: RunConfig) -> Path | None:
    """The newest of a run, once it is there."""
    driver = newest_driver(config.run_dir)
    return file_of_driver(config.run_dir, driver) if driver else None


def with_other_content(path: Path, to: Path, **changes: object) -> Path:
    """A copy of a scheduler file that says something else."""
    to.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to
