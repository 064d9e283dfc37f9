"""Workers that somebody else starts: how long they are waited for, from when they have time to be built, and who can do
without them. No processes: a scheduler that knows what the test says, and a clock that it sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.paths import RunPaths
from pipeline.config.sections import ClusterConfig
from pipeline.driver import supervision
from pipeline.driver.context import Context, ExecutorSettings
from pipeline.driver.supervision import Supervision
from pipeline.errors import ConfigError, StageFailed
from pipeline.graph.graph import Gang
from pipeline.observe.journal import EventKind
from pipeline.workers.attached import JoinRefused, write_exit_reason
from pipeline.workers.entry import build_worker, open_rendezvous
from stages.models.protocol import Role

ARRIVAL_S, START_S = 100.0, 30.0


class Pending:
    """A future that does not end."""

    status = "pending"

    def __init__(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        self.key = key
        self.arguments = arguments
        self.released = False

    def release(self) -> None:
        self.released = True


class Setting:
    """Owns a supervision whose clock, scheduler and journal are the test's."""

    def __init__(self, patch: pytest.MonkeyPatch, arrival_s: float | None, run_dir: Path = Path("runs/a")) -> None:
        self.now = 0.0
        self.there: set[str] = set()
        """Names of the processes that the scheduler knows."""
        self.stopped: set[str] = set()
        """Names of those whose heartbeats have ended."""
        self.submitted: list[tuple[Callable[..., Any], Pending]] = []
        self.warned: list[str] = []
        self.lost: list[str] = []
        self.down: list[tuple[str, int]] = []
        patch.setattr(supervision, "workers_by_address", lambda client: {f"at {name}": name for name in self.there})
        patch.setattr(supervision, "last_heartbeats", self.heartbeats)
        self.killed: list[str] = []
        patch.setattr(supervision, "kill_workers", lambda client, addresses: self.killed.extend(addresses))
        gangs = {
            "generate": Gang("generate", frozenset({Role.GENERATE}), workers=2, concurrent_shards=1),
            "train": Gang(
                "train", frozenset({Role.POLICY, Role.CRITIC, Role.REFERENCE}), workers=2, concurrent_shards=1
            ),
        }
        context: Any = Context(
            client=SimpleNamespace(submit=self.submit),
            gangs=gangs,
            dispatch=SimpleNamespace(on_worker_up=lambda *worker: None),
            journal=SimpleNamespace(append_now=self.note),
            settings=ExecutorSettings(
                cluster=ClusterConfig(
                    kind="local" if arrival_s is None else "attached",
                    arrival_timeout_s=arrival_s or 1.0,
                    deadline_s=1.0,
                ),
                start_timeout_s=START_S,
                paths=RunPaths(run_dir),
                ledger_url=f"{run_dir}/ledger",
                config_yaml="",
            ),
            name="x",
            now=lambda: self.now,
            watch_future=lambda *what: None,
        )
        self.supervision = Supervision(
            context, lambda gang: None, lambda worker, suspect: self.down.append(worker), lambda worker, numerics: None
        )
        self.supervision.start()

    def heartbeats(self, client: object) -> dict[str, float]:
        return {name: 0.5 if name in self.stopped else 1.0 + self.now for name in self.there}

    def submit(self, work: Callable[..., Any], *arguments: Any, key: tuple[Any, ...], **rest: Any) -> Pending:
        future = Pending(key, arguments)
        self.submitted.append((work, future))
        return future

    def note(self, kind: EventKind, **what: Any) -> None:
        if kind is EventKind.WARNED:
            self.warned.append(what["detail"])
        if kind is EventKind.GANG_LOST:
            self.lost.append(what["detail"])

    def look(self, at: float) -> None:
        self.now = at
        self.supervision.check_deadlines()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Setting]:
    return lambda *given: Setting(monkeypatch, *given)


def test_rank_0_says_where_its_gang_meets_before_any_rank_is_built(begin: Callable[..., Setting]) -> None:
    setting = begin(ARRIVAL_S)
    (rendezvous,) = [future for work, future in setting.submitted if work is open_rendezvous]
    builds = {future.key[1]: future.arguments[1:] for work, future in setting.submitted if work is build_worker}
    assert rendezvous.key[:2] == ("rendezvous-process", "train-0")
    assert builds == {"generate-0": (), "generate-1": (), "train-0": (rendezvous,), "train-1": (rendezvous,)}


def test_a_process_has_its_time_from_when_it_is_there(begin: Callable[..., Setting]) -> None:
    """Near the end of the time for it to come it comes; then it has all of the time to be built, and no more."""
    setting = begin(ARRIVAL_S)
    setting.there = {"generate-0"}
    setting.look(1.0)
    setting.there |= {"generate-1", "train-0", "train-1"}
    setting.look(ARRIVAL_S - 1)
    assert len(setting.warned) == 1
    assert setting.warned[0].startswith(
        "generate-0 is left out, and the rest of generate continues: worker generate-0 did not"
    )
    assert "cluster.start_timeout_s = 30" in setting.warned[0]


def test_a_process_stopped_while_it_is_built_is_missed_before_its_time_is_over(begin: Callable[..., Setting]) -> None:
    """Its heartbeats end, its gang is built again, and the run continues. A slow process still sends some."""
    setting = begin(None)
    setting.there = {"generate-0", "generate-1", "train-0", "train-1"}
    setting.look(1.0)
    setting.stopped = {"train-1"}
    setting.look(2.0)
    setting.look(21.0)
    assert setting.killed == []
    setting.look(23.0)
    assert sorted(setting.killed) == ["at train-0", "at train-1"]
    assert setting.lost == ["it sent no heartbeat for 21 s while it was built"]
    builds = [future.key[1:3] for work, future in setting.submitted if work is build_worker]
    assert builds[-2:] == [("train-0", 1), ("train-1", 1)]


def test_why_a_process_ended_itself_is_said_once(begin: Callable[..., Setting], tmp_path: Path) -> None:
    """By Dask's news alone it would only have ended."""
    setting = begin(None, tmp_path)
    logs = RunPaths(tmp_path).logs
    logs.mkdir()
    write_exit_reason(str(logs / "generate-1.log"), "the server of vllm said\nnothing for 60 s")
    for _ in range(2):
        setting.supervision.restart_lost(("generate", 1), "its process ended")
    assert setting.lost == ["its process ended: the server of vllm said nothing for 60 s", "its process ended"]
    assert not [*logs.iterdir()]


@pytest.mark.parametrize("arrival_s", [ARRIVAL_S, None])
def test_a_missing_rank_ends_the_run_and_the_command_is_said(
    begin: Callable[..., Setting], arrival_s: float | None
) -> None:
    setting = begin(arrival_s)
    setting.there = {"generate-0", "generate-1"}
    said = (
        "train-0 did not join within cluster.arrival_timeout_s = 100: `stageline worker runs/a --gang train --index 0`"
    )
    if arrival_s is None:
        said = "train-0 did not come up within cluster.start_timeout_s = 30"
    with pytest.raises(StageFailed, match=said):
        setting.look(ARRIVAL_S)


def test_a_pool_goes_on_without_whom_does_not_come_and_waits_on(begin: Callable[..., Setting]) -> None:
    setting = begin(ARRIVAL_S)
    setting.there = {"generate-0", "train-0", "train-1"}
    setting.look(ARRIVAL_S - START_S / 2)
    assert not setting.warned
    setting.look(ARRIVAL_S)
    assert "generate-1 did not join within cluster.arrival_timeout_s = 100" in setting.warned[0]
    assert setting.down == [("generate", 1)]
    work, newest = setting.submitted[-1]
    assert (work, newest.key[1:3]) == (build_worker, ("generate-1", 1)), "it gets work when it comes after all"


def test_a_host_that_is_refused(begin: Callable[..., Setting]) -> None:
    """A stranger is no matter; a replica's host is done without; a rank's ends the run, by the host's name."""
    setting = begin(ARRIVAL_S)
    setting.supervision.on_join_refused(JoinRefused("trian", 0, "host n1: the run has no gang 'trian'", fatal=False))
    setting.supervision.on_join_refused(JoinRefused("generate", 0, "host n2: its clock", fatal=True))
    assert ["host n1" in setting.warned[0], "host n2" in setting.warned[1]] == [True, True]
    assert setting.warned[1].startswith("generate-0 is left out, and the rest of generate continues: ")
    with pytest.raises(ConfigError, match=r"cluster\.kind: given 'attached'; worker train-1: host n3: its clock"):
        setting.supervision.on_join_refused(JoinRefused("train", 1, "host n3: its clock", fatal=True))
