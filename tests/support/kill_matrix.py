"""Runs whose processes are killed and stopped at moments that a seed draws; each must come to what an undisturbed run
comes to. `python -m tests.support.kill_matrix --kills 60`: the whole (`make test-faults`).

    reference run (η) ───────────────────────────────────────────────► rollouts, digests, exports
    run ──strike──strike── driver dead ──► resume ──strike── … ──► 0 ──► the same? check? orphans? memory?
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from tests.support.paths import ROOT
from tests.support.run_results import outputs
from tests.support.runs import QUIET, arguments, configure, placement
from tests.support.strikes import DRIVER, FOLDER, GROUP, Strike, draw, fired, write_plan
from tests.support.waiting import until

STRIKES_PER_RUN = 5
_PLACEMENT = placement("{generate: {workers: 2}, score: {}, train: {workers: 2}}", generate="generate", score="score",
                       others="train")  # fmt: skip
_CHANGES = (
    _PLACEMENT,
    *QUIET,
    "export.every=2",
    "cluster.attempts=50",  # each strike is one loss, and nothing may finish between two of them
    "cluster.deadline_s=10",  # of a process that is stopped
)


@dataclass
class Struck:
    """The outcome of one run."""

    name: str
    strikes: list[Strike]
    fired: list[Strike] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    """Exit codes of its drivers; negative: the signal."""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        told = [f"{self.name}: {len(self.fired)} strikes, drivers {self.codes}, {self.seconds:.1f} s"]
        told += [f"    {strike}{'' if strike in self.fired else ' (never came to it)'}" for strike in self.strikes]
        return "\n".join([*told, *(f"    FAULT {fault}" for fault in self.faults)])


@dataclass(frozen=True)
class Case:
    """A kind of run to strike. By default it is started, and then resumed."""

    changes: tuple[str, ...] = ()
    made_from: Path | None = None
    """The directory of a run to begin with a copy of; it is resumed then, and never started."""
    resume: tuple[str, ...] = ()
    """Arguments of every `resume`."""


PLAIN = Case()


def configured(folder: Path, name: str, staleness: int, *changes: str) -> RunConfig:
    return configure(folder, name, *_changes(staleness), *changes)


def _changes(staleness: int) -> tuple[str, ...]:
    return (*_CHANGES, f"staleness={staleness}")


def come_to(config: RunConfig) -> dict[str, Any]:
    """All that a run leaves that another of the same config must have, too: CRCs, digests, and exported weights."""
    exports = {
        str(file.relative_to(config.run_dir)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((Path(config.run_dir) / "weights").rglob("*.safetensors"))
    }
    return outputs(config) | exports


def run_struck(
    folder: Path, name: str, staleness: int, strikes: Sequence[Strike], case: Case = PLAIN
) -> tuple[RunConfig, Struck]:
    """Runs to the end, through whatever the strikes do; what should not have been is in `faults`."""
    config, struck = configured(folder, name, staleness, *case.changes), Struck(name, list(strikes))
    plan, began = folder / f"{name}.strikes", time.monotonic()
    write_plan(plan, strikes)
    file, *changes = arguments(folder, name, *_changes(staleness), *case.changes)
    command, sessions = ["run", file, *changes], []
    resume = ["resume", str(config.run_dir), *case.resume]
    if case.made_from is not None:
        shutil.copytree(case.made_from, config.run_dir)
        command = resume
    try:
        while not struck.codes or struck.codes[-1]:
            if len(struck.codes) > len(strikes) + 1:
                struck.faults.append("is not done, although nobody strikes any more")
                break
            code, session, said = _drive(config, plan, command)
            sessions.append(session)
            struck.codes.append(code)
            if code not in (0, -signal.SIGKILL):
                struck.faults.append(f"a driver ended with {code}: {said[-2000:]}")
            if Path(RunPaths(config.run_dir).config).exists():
                command = resume
        for session in sessions:
            _look_for_orphans(session, struck)
    except AssertionError as error:
        struck.faults.append(str(error))
    finally:
        for session in sessions:
            _end(session)
    struck.fired, struck.seconds = fired(plan, strikes), time.monotonic() - began
    if RunPaths(config.run_dir).board(None).exists():
        struck.faults.append(f"{RunPaths(config.run_dir).board(None)} is left in shared memory")
    if not struck.codes[-1]:
        struck.faults += verify_run(config).faults
        struck.faults += [f"{address} {attempt} left" for address, attempt in open_history(config).store.attempts()]
    return config, struck


def compare(struck: Struck, config: RunConfig, reference: RunConfig) -> None:
    """Adds what differs from an undisturbed run to the faults."""
    ours, theirs = come_to(config), come_to(reference)
    struck.faults += [f"{what} differs" for what in sorted(ours.keys() | theirs) if ours.get(what) != theirs.get(what)]


def _drive(config: RunConfig, plan: Path, command: Sequence[str]) -> tuple[int, int, str]:
    """Drive a run from its start to its end. Return exit code, session and output. A stopped driver is continued."""
    said = plan / "said.txt"
    environment = os.environ | {"PYTHONPATH": str(ROOT), FOLDER: str(plan)}
    with said.open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.support.struck_driver", str(config.run_dir), *command],
            stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    def ended() -> tuple[int, int] | None:
        pid, status = os.waitpid(driver.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGCONT)
            return None
        return (pid, status) if pid else None

    status = None
    try:
        _, status = until(ended, f"the end of a driver of {config.name}")
    finally:
        if status is None:
            _end(driver.pid)
            driver.wait()
    driver.returncode = os.waitstatus_to_exitcode(status)
    return driver.returncode, driver.pid, said.read_text()


def _members(session: int) -> list[psutil.Process]:
    """The processes of a driver's session that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _look_for_orphans(session: int, struck: Struck) -> None:
    """Note the processes that outlive their driver. A stopped process cannot see that the driver has ended, so it is
    continued first."""
    for process in _members(session):
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()
    _, left = psutil.wait_procs(_members(session), timeout=60)
    struck.faults += [f"orphan {process}" for process in left if process.is_running()]


def _end(session: int) -> None:
    for process in _members(session):
        process.kill()


def run_matrix(folder: Path, kills: int, first_seed: int, stalenesses: Sequence[int]) -> list[Struck]:
    """Runs until so many strikes came about, η by turns."""
    references: dict[int, RunConfig] = {}
    for staleness in stalenesses:
        references[staleness], undisturbed = run_struck(folder, f"reference-eta{staleness}", staleness, [])
        print(undisturbed, flush=True)
        assert not undisturbed.faults, undisturbed.faults
    results: list[Struck] = []
    seed = first_seed
    while sum(len(struck.fired) for struck in results) < kills:
        staleness = stalenesses[seed % len(stalenesses)]
        name = f"eta{staleness}-seed{seed}"
        config, struck = run_struck(folder, name, staleness, draw(seed, STRIKES_PER_RUN))
        if not struck.codes[-1]:
            compare(struck, config, references[staleness])
        print(struck, flush=True)
        results.append(struck)
        seed += 1
    return results


KEEP = ("storage.keep.rollouts=1", "storage.keep.exports=2", "checkpoint.keep_every=4", "export.every=1", "steps=9",
        "model.policy.decay=constant", "model.critic.decay=constant")  # fmt: skip


def run_aimed(folder: Path, every: int = 2) -> list[Struck]:
    """Kills of the driver, by turns with all that it started, at its own writes: while a run is prepared, started and
    resumed; while old rollouts and exports are let go; while its summary is written; and while `--from-checkpoint`
    archives, where the same command is given again and again."""

    def at(point: str, numbers: Iterable[int]) -> list[Strike]:
        return [Strike(DRIVER, point, n, (DRIVER, GROUP)[i % 2]) for i, n in enumerate(numbers)]

    references = {
        name: run_struck(folder, f"reference-{name}", 0, [], Case(changes))[0]
        for name, changes in {"plain": (), "keep": KEEP}.items()
    }
    plain = references["plain"].run_dir
    gone_back = folder / "gone-back"
    shutil.copytree(plain, gone_back)
    for newest in gone_back.glob("checkpoints/*/v000004"):
        shutil.rmtree(newest)
    cases = {
        "preparing": ("plain", at("preparing", range(1, 11, every)), PLAIN),
        "letting-go": ("keep", at("letting go", range(1, 16, every)), Case(KEEP)),
        "concluding": ("plain", at("concluding write", range(1, 4)), Case(made_from=plain)),
        "archiving": (
            "plain",
            at("preparing", [*range(1, 24, 2 * every), *range(24, 56, 4 * every)]),
            Case(made_from=gone_back, resume=("--from-checkpoint",)),
        ),
    }
    results = []
    for name, (reference, strikes, case) in cases.items():
        config, struck = run_struck(folder, name, 0, strikes, case)
        if not struck.codes[-1]:
            compare(struck, config, references[reference])
        print(struck, flush=True)
        results.append(struck)
    return results


def report(results: Sequence[Struck]) -> str:
    """Return a line with the strikes by signal and by target, and the number of sound runs."""
    strikes = [strike for struck in results for strike in struck.fired]
    by_target = Counter(strike.target.partition("-")[0] if strike.target != GROUP else GROUP for strike in strikes)
    by_signal = Counter(strike.signal for strike in strikes)
    sound = sum(not struck.faults for struck in results)
    return (
        f"{len(strikes)} strikes ({_counted(by_signal)}; {_counted(by_target)}) in {len(results)} runs, "
        f"{sum(len(struck.codes) - 1 for struck in results)} of them resumed; {sound} of {len(results)} runs are sound "
        "and equal to an undisturbed one"
    )


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--folder", type=Path, help="keep the runs there; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as temporary:
        folder = options.folder or Path(temporary)
        results = run_matrix(folder, options.kills, options.seed, options.staleness)
        aimed = run_aimed(folder)
    print(report(results))
    print(f"Aimed at a driver's own writes: {report(aimed)}")
    results += aimed
    return int(any(struck.faults for struck in results))


if __name__ == "__main__":
    sys.exit(main())
