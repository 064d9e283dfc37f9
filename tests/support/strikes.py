"""Signals at chosen moments: which process reaches which point for the n-th time, and what it sends to whom then.

    plan.json: [strike 0, strike 1, …] ──► every process counts its own points for the first strike that has not fired
    fired-<i>: made exclusively, just before strike i; the next one is armed from then on

A moment is a point in the code, never a time: what a seed draws can be drawn again. Standard library only, so that
the driver's script
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "STAGELINE_STRIKES"
"""Environment variable: the folder with the plan. Without it nothing is ever struck."""
DRIVER, GROUP = "driver", "group"
DRIVER_PID = "driver.pid"


@dataclass(frozen=True)
class Strike:
    who: str
    """Reaches the point: a worker's name, or `driver`."""
    point: str
    nth: int
    """1: the first time after the strike before it."""
    target: str
    """Whom the signal goes to: a worker's name, `driver`, or `group` (the driver and all that it started)."""
    signal: str = "SIGKILL"

    def __str__(self) -> str:
        return f"{self.signal} to {self.target} when {self.who} reaches {self.point} no. {self.nth}"


_LATE = {"export": 3, "concluding": 4, "snapshot written": 2, "checkpoint finish": 2, "checkpoint begin": 1}
"""Points that a run comes to late: strikes there come last, or the rest of the plan would find no run to strike."""
_POINTS: dict[str, dict[str, int]] = {
    "generate": {"file": 8, "commit": 2, "committed": 2, "move": 10, "pass": 12, "built": 1},
    "score": {"file": 2, "commit": 3, "committed": 3, "move": 4, "built": 1},
    "train-0": {
        "file": 12, "commit": 8, "committed": 8, "move": 12, "minibatch": 8, "stepped": 8, "board": 2, "manifest": 2,
        "checkpoint begin": 2, "snapshot written": 2, "checkpoint finish": 2, "export": 1, "built": 1,
    },
    "train-1": {"minibatch": 8, "stepped": 8, "snapshot written": 2, "built": 1},
    "driver": {"event": 60},
}  # fmt: skip
"""By process: its points, and the most times that a strike waits for one."""


def draw(seed: int, count: int) -> list[Strike]:
    """Strikes of one run. Who is struck goes round the kinds of processes, from a place that the seed says; where, how
    and how late is drawn. One in eight stops its process instead of ending it."""
    chance = random.Random(seed)
    targets = ["generate", "train-1", DRIVER, "score", "train-0", GROUP]
    strikes = []
    for number in range(count):
        target = targets[(seed * count + number) % len(targets)]
        if target == "generate":
            target = f"generate-{chance.randrange(2)}"
        elif target == "score":
            target = "score-0"
        strikes.append(_drawn(chance, target))
    return sorted(strikes, key=lambda strike: _LATE.get(strike.point, 0))


def _drawn(chance: random.Random, target: str) -> Strike:
    """A worker is struck at a point of its own, or when the driver writes some event; the driver and the group also
    when a worker is in the middle of something."""
    workers = ["generate-0", "generate-1", "score-0", "train-0", "train-1"]
    if target in (DRIVER, GROUP):
        who = chance.choice([DRIVER, DRIVER, *workers])
    else:
        who = chance.choice([DRIVER, target, target, target])
    if who == DRIVER and target in (DRIVER, GROUP) and chance.random() < 0.1:
        return Strike(who, "concluding", 1, target)
    points = _POINTS[who] if who in _POINTS else _POINTS[who.partition("-")[0]]
    point = chance.choice(sorted(points))
    # One that is stopped while it is built is missed after a third of cluster.start_timeout_s: 100 s.
    stops = target != GROUP and chance.random() < 0.125 and point != "built"
    return Strike(who, point, chance.randint(1, points[point]), target, "SIGSTOP" if stops else "SIGKILL")


def write_plan(folder: Path, strikes: Iterable[Strike]) -> None:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps([asdict(strike) for strike in strikes]))


def fired(folder: Path, strikes: Sequence[Strike]) -> list[Strike]:
    """Return the strikes that happened."""
    return [strike for number, strike in enumerate(strikes) if (folder / f"fired-{number}").exists()]


class Striker:
    """Owns the counts of one process's points."""

    def __init__(self, name: str, run_logs: Path) -> None:
        """`name`: of this process. `run_logs`: the folder of the workers' logs, whose heads have process ids."""
        self.folder = Path(os.environ[FOLDER])
        self.name = name
        self._logs = run_logs
        self._plan = [Strike(**fields) for fields in json.loads((self.folder / "plan.json").read_text())]
        self._armed = 0
        self._counts: dict[str, int] = {}

    def reach(self, point: str) -> None:
        """This process is at a point; if a strike waits for that, it is carried out."""
        if self.due(point):
            self.strike()

    def due(self, point: str) -> bool:
        """Counts a point; whether the armed strike is to be carried out now."""
        armed = self._armed
        while armed < len(self._plan) and (self.folder / f"fired-{armed}").exists():
            armed += 1
        if armed != self._armed:
            self._armed = armed
            self._counts.clear()
        if armed == len(self._plan) or (self._plan[armed].who, self._plan[armed].point) != (self.name, point):
            return False
        self._counts[point] = self._counts.get(point, 0) + 1
        return self._counts[point] >= self._plan[armed].nth

    def strike(self) -> None:
        """Carries the armed strike out, unless another process was faster or its target is not there now."""
        strike = self._plan[self._armed]
        driver = int((self.folder / DRIVER_PID).read_text())
        pid = self._process(strike.target, driver)
        if pid is None:
            return
        try:
            os.close(os.open(self.folder / f"fired-{self._armed}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        number = signal.Signals[strike.signal]
        if strike.target == GROUP:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)

    def _process(self, target: str, driver: int) -> int | None:
        """Its process id; None if it has ended, and the next one is not built yet."""
        if target == self.name:
            return os.getpid()
        if target in (DRIVER, GROUP):
            return driver
        try:
            lines = (self._logs / f"{target}.log").read_text().splitlines()
            pid = int(next(line for line in reversed(lines) if line.startswith("----")).rpartition(" ")[2])
            return pid if os.getsid(pid) == driver else None
        except (FileNotFoundError, StopIteration, ProcessLookupError):
            return None
