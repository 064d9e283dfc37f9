"""The processes of the ranks that hold a model together with this one. May import stages.engines.

A thread of this object starts them, waits for them and reaps them: they die with it (`rank_main`), so nothing is left
behind whatever happens to this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TypeVar

from stages.engines.embedded.ranks.commands import READY
from stages.engines.embedded.ranks.rank_model import RankSpec

Result = TypeVar("Result")
_ROOT = Path(__file__).resolve().parents[4]
_NOTICE_S = 30.0
"""For the end of a process to be noticed, after a connection to it broke."""


class RankLost(RuntimeError):
    """A rank's process has ended by itself: names it, and how it ended."""


@dataclass(frozen=True)
class RankProcess:
    """This process's ends of what connects it to a rank."""

    spec: RankSpec
    commands: Connection
    weights: Connection


class RankProcesses:
    """Owns the other ranks' processes. If one of them ends, so do the others."""

    def __init__(self, specs: Sequence[RankSpec], on_lost: Callable[[str], None] | None = None) -> None:
        """Starts them; `meet` waits until they run. `on_lost` is called, with what happened, in a thread of its own and
        before any `attempt` fails of it: who ends the process there is sure that nobody took the loss for an error."""
        self._lost: str | None = None
        self._noticed = threading.Event()
        self._closing = False
        self._on_lost = on_lost
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ranks: list[RankProcess] = []
        started = threading.Event()
        theirs: list[tuple[Connection, Connection]] = []
        for spec in specs:
            (commands, their_commands), (weights, their_weights) = Pipe(), Pipe()
            self.ranks.append(RankProcess(spec, commands, weights))
            theirs.append((their_commands, their_weights))
        self._thread = threading.Thread(target=self._watch, args=(theirs, started), name="engine-ranks", daemon=True)
        self._thread.start()
        started.wait()

    def meet(self) -> None:
        """Sends each rank its spec and waits until it has begun. Raises RankLost."""
        for rank in self.ranks:
            self.attempt(partial(rank.commands.send, rank.spec))
        for rank in self.ranks:
            answer = self.attempt(rank.commands.recv)
            assert answer == READY

    def attempt(self, act: Callable[[], Result]) -> Result:
        """What `act` gives. Raises RankLost where it fails because a rank has gone."""
        try:
            return act()
        except (RuntimeError, EOFError, OSError) as error:  # gloo's, NCCL's and the connections' way to say it
            if not self._noticed.wait(_NOTICE_S) or self._lost is None:
                raise
            raise RankLost(self._lost) from error

    def close(self) -> None:
        """Ends the processes, in the middle of whatever they do: they keep nothing. Twice is harmless."""
        self._closing = True
        for process in self._processes:
            process.kill()
        self._thread.join()
        self._noticed.set()  # nobody need wait to hear how they ended
        for rank in self.ranks:
            rank.commands.close()
            rank.weights.close()

    def _watch(self, theirs: Sequence[tuple[Connection, Connection]], started: threading.Event) -> None:
        alive: dict[Connection, int] = {}
        try:
            for i, (commands, weights) in enumerate(theirs):
                life, their_life = Pipe(duplex=False)
                alive[life] = i
                self._processes.append(self._start(self.ranks[i].spec, commands, weights, their_life))
                for end in (commands, weights, their_life):
                    end.close()
        finally:
            started.set()
        while alive:
            for life in [life for life in wait(list(alive)) if isinstance(life, Connection)]:
                i = alive.pop(life)
                life.close()
                self._reap(i)

    def _start(
        self, spec: RankSpec, commands: Connection, weights: Connection, life: Connection
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "stages.engines.embedded.ranks.rank_main",
                str(commands.fileno()),
                str(weights.fileno()),
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.threads), "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.DEVNULL,
            pass_fds=[end.fileno() for end in (commands, weights, life)],
        )

    def _reap(self, i: int) -> None:
        code = self._processes[i].wait()
        if self._closing or self._lost is not None:
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        self._lost = f"{self.ranks[i].spec.name} of the engine (process {self._processes[i].pid}) {how}"
        for process in self._processes:
            process.kill()
        try:
            if self._on_lost is not None:
                self._on_lost(self._lost)
        finally:
            self._noticed.set()
