"""The executor on real processes, with stages that compute nothing: it must survive what machines do.

Every fault is set off when a node is known to have begun (its line is in runs.log) and is held there by a file, so that
no test depends on timing. Why each exists is said in its docstring.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed.comm import connect
from distributed.security import Security

from pipeline.config.loading import load_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.cluster import LocalWorkers, kill_workers, workers_by_address
from pipeline.driver.context import ExecutorEvents, ExecutorSettings, WorkerKey
from pipeline.driver.executor import Executor
from pipeline.driver.supervision import HeartbeatWatch
from pipeline.errors import ConfigError, StageFailed
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node, run_nodes
from pipeline.observe.journal import EventKind, Journal, read_events
from pipeline.workers.messages import Outcome
from storage.address import Address
from storage.ledger import Ledger
from tests.support.runs import placement
from tests.support.waiting import until

pytestmark = pytest.mark.processes

SHARDS = 4


def configure(runs_dir: Path, name: str, **changes: Any) -> RunConfig:
    settings = {
        "steps": 2,
        "staleness": 1,
        "model.path": "none",
        "prompts.url": "none",
        "reward.kind": "none",
        "rollout.rows": 2 * SHARDS,
        "rollout.shards": SHARDS,
        "evaluate.every": 0,
        "cluster.dashboard": "null",
        **changes,
    }
    gangs = "{generate: {workers: 2, concurrent_shards: 2}, train: {workers: 2}, score: {}}"
    where = placement(gangs, generate="generate", score="score", others="train")
    return load_config([], [f"name={name}", f"runs_dir={runs_dir}", where, *(f"{k}={v}" for k, v in settings.items())])


class Run(ExecutorEvents):
    """Owns the executor of one run on a shared cluster, and steers its stages through files."""

    def __init__(
        self, workers: LocalWorkers, config: RunConfig, *, deadline_s: float = 60.0, attempts: int = 3
    ) -> None:
        self.config = config
        self.dir = config.run_dir
        (self.dir / "control").mkdir(parents=True)
        self.journal = Journal(self.dir / "events.jsonl")
        self.ledger = Ledger(str(self.dir / "ledger"))
        dispatch = Dispatch(config.gangs())
        self.flow = Flow(
            config.graph(),
            dispatch,
            on_step=lambda step, nodes: self.executor.release([n.address for n in nodes]),
            on_unread=lambda version: None,
        )
        settings = ExecutorSettings(
            cluster=replace(config.cluster, deadline_s=deadline_s, attempts=attempts),
            start_timeout_s=60.0,
            paths=RunPaths(self.dir),
            ledger_url=f"{self.dir}/ledger",
            config_yaml=to_yaml(config),
            runtime="tests.support.noop_runtime:NoopRuntime",
        )
        self.when: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
        self.refused: dict[WorkerKey, str] = {}
        """Workers that are not to be built, and why."""
        self.executor = Executor(workers.client, dispatch, self.journal, settings, self)
        self.on_done: Callable[[Node], Any] = lambda node: None

    def on_node_done(self, node: Node, outcome: Outcome) -> None:
        self.flow.on_node_done(node)
        self.on_done(node)

    def on_worker_built(self, worker: WorkerKey, numerics: Mapping[str, str]) -> None:
        if worker in self.refused:
            raise ConfigError("cluster.same_numerics", self.refused[worker])

    def start_timeout_is_over(self) -> None:
        """By the driver's clock, for whoever is being built or waited for now; nobody was silent meanwhile."""
        supervision = self.executor._supervision
        self.executor._now += supervision._context.settings.start_timeout_s + 1
        supervision._heartbeats = HeartbeatWatch()

    def everyone_is_up(self) -> bool:
        """Before that, a start timeout that is over leaves out who is still being built, with a warning."""
        return [self.built(gang) for gang in ("generate", "score", "train")] == [2, 1, 1]

    def built(self, gang: str) -> int:
        """Return the number of times that a worker of the gang (in an ordered gang: all of them) was built."""
        return sum(event.gang == gang for event in self.events(EventKind.GANG_BUILT))

    def control(self, what: str, suffix: str, text: str = "") -> Path:
        path = self.dir / "control" / f"{what}.{suffix}"
        path.write_text(text)
        return path

    def then(self, happened: Callable[[], Any], action: Callable[[], Any]) -> None:
        """Does something, once, as soon as something else has happened; in the order of the calls."""
        self.when.append((happened, action))

    def _finished(self) -> bool:
        while self.when and self.when[0][0]():
            self.when.pop(0)[1]()
        return self.flow.is_finished and not self.when

    def go(self) -> None:
        self.executor.start()
        self.flow.advance()
        self.executor.run(self._finished)

    def log(self, name: str) -> list[list[str]]:
        """The lines of a log that are complete, each as its words."""
        path = self.dir / f"{name}.log"
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text.split("\n")[:-1]]

    def pid_of(self, worker: str) -> int:
        """The newest process that was built as this worker."""
        return next(int(pid) for name, pid, _ in reversed(self.log("built")) if name == worker)

    def began(self, address: Address, worker: str = "") -> Callable[[], bool]:
        """Return a function that tells if a call began, on this worker or on any."""
        return lambda: any(line[0] == str(address) and worker in ("", line[1]) for line in self.log("runs"))

    def first_at(self, address: Address) -> str:
        """The worker that the node began on first."""
        return next(line[1] for line in self.log("runs") if line[0] == str(address))

    def signal(self, worker: str, number: int) -> Callable[[], None]:
        return lambda: os.kill(self.pid_of(worker), number)

    def kill(self, worker: str) -> Callable[[], None]:
        return self.signal(worker, signal.SIGKILL)

    def assert_whole(self) -> None:
        """Every node of the graph has its commit, and no update was trained more often than it was lost."""
        committed = [commit.address for commit in self.ledger.list()]
        assert sorted(committed) == sorted(node.address for node in run_nodes(self.config.graph()))

    def events(self, kind: EventKind) -> list[Any]:
        return [event for event in read_events(self.dir / "events.jsonl") if event.kind is kind]

    def close(self) -> None:
        self.executor.close()
        self.journal.close()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorkers]:
    with LocalWorkers(configure(tmp_path_factory.mktemp("cluster"), "cluster"), num_gpus=4) as local:
        yield local


@pytest.fixture
def start(workers: LocalWorkers, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a run. Afterwards all processes are replaced: what a fault left hanging must not meet the next test."""
    runs: list[Run] = []

    def make(deadline_s: float = 60.0, attempts: int = 3, **changes: Any) -> Run:
        config = configure(tmp_path, f"run{len(runs)}", **changes)
        runs.append(Run(workers, config, deadline_s=deadline_s, attempts=attempts))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
    before = set(workers_by_address(workers.client))
    kill_workers(workers.client, before)
    until(lambda: len(workers_by_address(workers.client)) == 5, "all workers are back")
    until(lambda: not workers.client.run_on_scheduler(_num_tasks), "the scheduler forgot the run")


def _num_tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


def test_every_worker_is_shown_its_own_gpus(workers: LocalWorkers) -> None:
    """This host claims four GPUs; scoring needs none."""
    shown = workers.client.run(lambda dask_worker: (dask_worker.name, os.environ["CUDA_VISIBLE_DEVICES"]))
    assert dict(shown.values()) == {"generate-0": "2", "generate-1": "3", "train-0": "0", "train-1": "1", "score-0": ""}


@pytest.mark.parametrize(
    ("given", "message"),
    [("no certificate", "closed|reset"), ("a certificate of its own", "TLS certificate does not match|closed|reset")],
)
def test_who_lacks_the_runs_certificate_is_refused(workers: LocalWorkers, given: str, message: str) -> None:
    """By the scheduler, the workers and their nannies: whoever can talk to one of them can have it run anything, and
    every user of the host can connect to its loopback ports."""
    security = Security.temporary() if given == "a certificate of its own" else None
    info = workers.client.scheduler_info(n_workers=-1)
    addresses = [info["address"], *info["workers"], *(each["nanny"] for each in info["workers"].values())]
    assert len(addresses) == 1 + 2 * 5
    for address in addresses:
        assert address.startswith("tls://127.0.0.1:")
        where = address if security else address.replace("tls://", "tcp://")

        async def ask(where: str) -> object:
            arguments = security.get_connection_args("client") if security else {}
            comm = await asyncio.wait_for(connect(where, timeout=60, **arguments), 60)
            try:
                await comm.write({"op": "identity", "reply": True})
                return await asyncio.wait_for(comm.read(), 60)
            finally:
                comm.abort()

        with pytest.raises(OSError, match=message):
            asyncio.run(ask(where))


# ---- no faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 2])
def test_runs_to_the_end(start: Callable[..., Run], staleness: int) -> None:
    """Nothing runs twice if nothing is lost."""
    run = start(steps=4, staleness=staleness, **{"evaluate.every": 2})
    run.go()
    run.assert_whole()
    nodes = list(run_nodes(run.config.graph()))
    ranks = sum(2 if node.role in ("policy", "critic", "reference") else 1 for node in nodes)
    assert len(run.log("runs")) == ranks
    assert [e.step for e in run.events(EventKind.PUBLISHED)] == list(range(5))
    assert not run.log("discarded")


def test_slower_replica_gets_fewer_shards(start: Callable[..., Run]) -> None:
    """Dask left to itself gives each half. Here one replica does not finish its two before the other has had the other
    six."""
    run = start(steps=1, **{"rollout.shards": 8, "rollout.rows": 16})
    held = [run.control(f"generate-0-{shard}@generate-1", "hold") for shard in range(8)]

    def shards_of(worker: str) -> int:
        return sum(line[0].startswith("generate") and line[1] == worker for line in run.log("runs"))

    run.then(lambda: shards_of("generate-0") == 6, lambda: [path.unlink() for path in held])
    run.go()
    run.assert_whole()
    assert (shards_of("generate-0"), shards_of("generate-1")) == (6, 2)


def test_scheduler_forgets_old_steps(start: Callable[..., Run], workers: LocalWorkers) -> None:
    """Dask remembers every ancestor of a task that it remembers: one chain of edges from step to step would keep the
    whole run in the scheduler's memory (here 20 steps of 18 nodes), and run it again when a result is lost."""
    run = start(steps=20, **{"rollout.shards": 2, "rollout.rows": 4})
    held: list[int] = []

    def count(node: Node) -> None:
        if node.stage == "publish":
            held.append(workers.client.run_on_scheduler(_num_tasks))

    run.on_done = count
    run.go()
    nodes_of_a_step, ranks, window, lineage = 15, 2, 3, 8
    assert max(held) <= nodes_of_a_step * ranks * (window + lineage)
    assert len(list(run_nodes(run.config.graph()))) == 20 * nodes_of_a_step + 1


# ---- a process is killed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "worker"),
    [("generate", ""), ("score", "score-0"), ("update_policy", "train-0"), ("update_policy", "train-1")],
)
def test_killed_in_a_node(start: Callable[..., Run], stage: str, worker: str) -> None:
    """The node runs again on a process built anew, and everything is committed once. With update_policy[1] the new gang
    has no state: it replays update 0 from the ledger. (In the gang, the other rank hangs in a collective.)"""
    run = start()
    node = Address(stage, 1)
    held = run.control(f"{stage}-1-0@{worker or '*'}", "hold")
    run.then(run.began(node, worker), lambda: run.kill(worker or run.first_at(node))())
    run.then(lambda: run.events(EventKind.GANG_LOST), held.unlink)
    run.go()
    run.assert_whole()
    assert {e.gang for e in run.events(EventKind.GANG_LOST)} == {worker.rpartition("-")[0] or "generate"}
    trained = Counter(address for address, _ in run.log("trained"))
    assert set(trained.values()) == {1}
    if stage == "update_policy":
        assert [str(Address(stage, 0)), "train-0"] in run.log("replayed")
    else:
        assert not run.log("replayed"), "a lost replica must not touch the trainer"


def test_a_rank_that_hangs_is_named_and_its_gang_is_built_anew(start: Callable[..., Run]) -> None:
    """Long before `cluster.deadline_s`, which would only say that the node is overdue."""
    run = start(attempts=20, **{"cluster.collective_timeout_s": 12})
    held = run.control("update_policy-0-0@train-1", "hold")
    run.then(lambda: run.events(EventKind.GANG_LOST), held.unlink)
    run.go()
    run.assert_whole()
    lost = run.events(EventKind.GANG_LOST)[0]
    assert lost.worker == "train-1"
    node = Address("update_policy", 0)
    assert lost.detail.startswith(f"{node}: rank 1 (last seen at ")
    assert "of 2 did not come to a collective: not within cluster.collective_timeout_s = 12" in lost.detail


@pytest.mark.parametrize("worker", ["train-1", "score-0"])
def test_killed_while_idle(start: Callable[..., Run], worker: str) -> None:
    """Nobody calls the worker, so no call fails: the scheduler's news must suffice, before the worker is needed."""
    run = start(steps=1)
    held = [run.control(f"generate-0-{shard}@*", "hold") for shard in range(SHARDS)]
    gang = worker.rpartition("-")[0]

    def built() -> int:
        return sum(e.gang == gang for e in run.events(EventKind.GANG_BUILT))

    published = run.began(Address("publish", 0), "train-1")
    run.then(lambda: published() and run.events(EventKind.PUBLISHED) and built() == 1, run.kill(worker))
    run.then(lambda: built() == 2, lambda: [path.unlink() for path in held])
    run.go()
    run.assert_whole()
    assert not [e for e in run.events(EventKind.FAILED) if e.stage != "score"]


def test_result_lost_with_its_holder(start: Callable[..., Run]) -> None:
    """Dask computes a lost result again, and everything that it has let go of among the ancestors: here generate[1,0]
    would need publish[0], on a trainer that has gone on. Such calls are answered from the ledger, wherever they run."""
    run = start(steps=2)
    held = run.control("advantage-1-0@score-0", "hold")
    both = lambda: (run.kill("generate-0")(), run.kill("generate-1")())  # noqa: E731
    run.then(run.began(Address("advantage", 1), "score-0"), both)
    run.then(lambda: len(run.events(EventKind.GANG_LOST)) == 2, held.unlink)
    run.go()
    run.assert_whole()
    calls = Counter((address, worker) for address, worker, _ in run.log("runs"))
    assert calls[str(Address("publish", 0)), "train-0"] == 1
    assert set(calls.values()) == {1}


# ---- a process is stopped -----------------------------------------------------------------------------------------


def test_stopped_replica_comes_back(start: Callable[..., Run]) -> None:
    """The other replica takes its shard over. When it wakes it loses the commit, discards its own output, and is given
    work again."""
    run = start(steps=12, staleness=0, deadline_s=6.0)  # it may come back some steps later
    node = Address("generate", 0, 0)
    held = {f"generate-{i}": run.control(f"generate-0-0@generate-{i}", "commit") for i in (0, 1)}

    def stop() -> None:
        stopped = run.first_at(node)
        run.signal(stopped, signal.SIGSTOP)()
        held.pop("generate-1" if stopped == "generate-0" else "generate-0").unlink()

    def wake() -> None:
        [(stopped, hold)] = held.items()
        hold.unlink()
        run.signal(stopped, signal.SIGCONT)()

    def used_again() -> bool:
        later = [worker for a, worker, _ in run.log("runs") if a.startswith("generate/") and "step_000000" not in a]
        return bool(held.keys() & set(later))

    run.then(lambda: any(line[0] == str(node) for line in run.log("committing")), stop)
    run.then(lambda: run.ledger.find(node), wake)
    run.go()
    run.assert_whole()
    discarded = run.log("discarded")  # perhaps also the other shard that both had in hand: then either may have won it
    assert [str(node), *held] in discarded
    winners = {str(commit.address): commit.provenance.worker for commit in run.ledger.list("generate")}
    assert all(winners[address] != worker for address, worker in discarded)
    assert not run.events(EventKind.GANG_LOST), "nothing is killed: not it, nor who might have waited for it"
    assert used_again()


@pytest.mark.parametrize("worker", ["", "train-1"])
def test_stopped_for_good(start: Callable[..., Run], worker: str) -> None:
    """A stopped process answers nothing and is not dead: it is killed after its deadline (a gang), or after a second
    one, while another replica does its work (a replica)."""
    run = start(steps=2, deadline_s=6.0, attempts=9)
    node = Address("update_policy", 0) if worker else Address("generate", 1, 0)
    hold = run.control(f"{node.stage}-{node.step}-{node.shard}@{worker or '*'}", "hold")

    def stop() -> None:
        run.signal(worker or run.first_at(node), signal.SIGSTOP)()
        hold.unlink()

    run.then(run.began(node, worker), stop)
    run.then(lambda: run.events(EventKind.GANG_LOST), lambda: None)
    run.go()
    run.assert_whole()
    assert [e.gang for e in run.events(EventKind.GANG_LOST)] == ["train" if worker else "generate"]


# ---- a pool with fewer replicas -----------------------------------------------------------------------------------


def test_a_replica_that_does_not_come_up_is_left_out_and_works_when_it_does(start: Callable[..., Run]) -> None:
    """Its host may be gone: the others do its work, and it gets its share when it comes up after all."""
    run = start(steps=2, staleness=0)
    missing = run.control("build@generate-1", "hold")
    last = [run.control(f"generate-1-{shard}@generate-0", "hold") for shard in range(SHARDS)]
    others_up = lambda: run.built("generate") == run.built("train") == run.built("score") == 1  # noqa: E731
    run.then(others_up, run.start_timeout_is_over)
    begun_alone = lambda: run.began(Address("generate", 1, 0))() or run.began(Address("generate", 1, 1))()  # noqa: E731
    run.then(begun_alone, missing.unlink)
    both = lambda: {line[1] for line in run.log("runs") if line[0].startswith("generate/step_000001")}  # noqa: E731
    run.then(lambda: both() == {"generate-0", "generate-1"}, lambda: [path.unlink() for path in last])
    run.go()
    run.assert_whole()
    (warned,) = run.events(EventKind.WARNED)
    assert (warned.gang, warned.worker) == ("generate", "generate-1")
    assert str(warned.detail).startswith(
        "generate-1 is left out, and the rest of generate continues: worker generate-1 did"
    )
    assert {line[1] for line in run.log("runs") if line[0].startswith("generate/step_000000")} == {"generate-0"}
    assert run.built("generate") == 2


def test_a_replica_with_other_numerics_is_left_out_and_tried_again(start: Callable[..., Run]) -> None:
    """Its numbers would differ, and nobody needs them, so the others continue. Back on its old host, it works again."""
    run = start(steps=2, staleness=0)
    run.refused["generate", 1] = "computes with others"
    held = run.control("generate-1-0@*", "hold")

    def back() -> None:
        run.refused.clear()
        run.start_timeout_is_over()

    run.then(run.began(Address("generate", 1, 0)), back)
    run.then(lambda: run.built("generate") == 2, held.unlink)
    run.go()
    run.assert_whole()
    (warned,) = run.events(EventKind.WARNED)
    assert "computes with others (host " in str(warned.detail)
    assert str(warned.detail).endswith("it is tried again in 60 s")
    assert {line[1] for line in run.log("runs") if line[0].startswith("generate/step_000000")} == {"generate-0"}


@pytest.mark.parametrize("fault", ["hold", "numerics"])
def test_the_last_replica_ends_the_run(start: Callable[..., Run], fault: str) -> None:
    run = start()
    if fault == "hold":
        for replica in range(2):
            run.control(f"build@generate-{replica}", "hold")
        run.then(lambda: run.built("train") and run.built("score"), run.start_timeout_is_over)
    else:
        run.refused = {("generate", replica): "computes with others" for replica in range(2)}
    match = "did not come up within cluster.start_timeout_s = 60" if fault == "hold" else "computes with others"
    with pytest.raises((StageFailed, ConfigError), match=match):
        run.go()
    assert len(run.events(EventKind.WARNED)) == 1, "the first one was left out"


# ---- what ends a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "worker"), [("generate", "*"), ("update_policy", "train-1")])
def test_stage_that_raises_ends_the_run(start: Callable[..., Run], stage: str, worker: str) -> None:
    """The message names node, error and log. In the gang rank 0 hangs in a collective and must not be waited for."""
    run = start()
    run.control(f"{stage}-0-0@{worker}", "raise", "no such colour")
    with pytest.raises(StageFailed, match=f"{stage}/step_000000/shard_0000 raised ValueError: no such colour") as e:
        run.go()
    further = e.value.further
    inputs = "none but the prompts" if stage == "generate" else "advantage/step_000000/shard_0000"
    assert inputs in further["inputs"]
    assert "/logs/" in further["log"]
    assert further["run it alone"] == f"stageline replay {run.dir} --step 0 --stage {stage}"
    assert run.ledger.find(Address(stage, 0)) is None
    assert any("no such colour" in path.read_text() for path in (run.dir / "logs").iterdir())


@pytest.mark.parametrize(("stage", "worker"), [("score", "*"), ("update_policy", "train-1")])
def test_a_stage_whose_store_is_away_is_tried_again(start: Callable[..., Run], stage: str, worker: str) -> None:
    """After a while, by the driver's clock; a gang is built anew, since its other ranks wait in a collective."""
    run = start(steps=1)
    away = run.control(f"{stage}-0-0@{worker}", "unavailable", "the server said so")
    kind = EventKind.WARNED if stage == "score" else EventKind.GANG_LOST

    def back() -> None:
        away.unlink()
        if stage == "score":
            run.start_timeout_is_over()

    run.then(lambda: run.events(kind) and (stage != "score" or run.everyone_is_up()), back)
    run.go()
    run.assert_whole()
    (event,) = run.events(kind)
    assert "the server said so" in str(event.detail)
    assert "score" not in stage or str(event.detail).endswith("tried again in 2 s")


def test_a_store_that_stays_away_ends_the_run(start: Callable[..., Run]) -> None:
    run = start(steps=1, attempts=2)
    run.control("score-0-0@*", "unavailable", "the server said so")
    run.then(lambda: run.everyone_is_up() and run.events(EventKind.WARNED), run.start_timeout_is_over)
    with pytest.raises(StageFailed, match=r"score/step_000000/shard_0000 raised OSError: .*the server said so") as e:
        run.go()
    assert "--stage score" in e.value.further["run it alone"]
    assert len(run.events(EventKind.WARNED)) == 1


def test_node_that_is_lost_too_often_ends_the_run(start: Callable[..., Run]) -> None:
    """A shard that kills its engine would otherwise kill engines for ever."""
    run = start(steps=1, attempts=2, **{"rollout.shards": 1})
    run.control("generate-0-0@*", "hold")
    for times in (1, 2):
        begun = lambda times=times: sum(line[0].startswith("generate") for line in run.log("runs")) == times  # noqa: E731
        run.then(begun, lambda: os.kill(int(run.log("runs")[-1][2]), signal.SIGKILL))
    with pytest.raises(StageFailed, match=r"lost.* 2 times \(cluster.attempts\)"):
        run.go()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("raise", r"score-0 could not be built: ValueError: no such model"), ("exit", r"score-0 was lost 2 times")],
)
def test_worker_that_cannot_be_built_ends_the_run(start: Callable[..., Run], fault: str, message: str) -> None:
    run = start(attempts=2)
    run.control("build@score-0", fault, "no such model")
    with pytest.raises(StageFailed, match=message) as e:
        run.go()
    assert fault == "exit" or "/logs/" in e.value.further["log"]


def test_interrupted_run_can_be_closed(start: Callable[..., Run]) -> None:
    """Ctrl-C arrives anywhere in the loop; what is committed stays."""
    run = start()
    run.control("update_policy-0-0@*", "hold")

    def interrupt() -> None:
        raise KeyboardInterrupt

    run.then(run.began(Address("update_policy", 0), "train-0"), interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    run.close()
    assert run.ledger.find(Address("advantage", 0)) is not None
    assert run.ledger.find(Address("update_policy", 0)) is None


# ---- versions of the weights under `rollout.versions: latest` -------------------------------------------------------


def generated_with(run: Run, step: int) -> list[int]:
    """By shard of a step, the version that it was handed out with."""
    commits = [run.ledger.get(Address("generate", step, shard)) for shard in range(SHARDS)]
    return [commit.provenance.weight_versions[0] for commit in commits]


def hold_step_1(run: Run) -> list[Path]:
    """Let the shards of step 1 take all slots, so that step 2 is not handed out until the returned files are gone."""
    return [run.control(f"generate-1-{shard}@*", "hold") for shard in range(SHARDS)]


@pytest.mark.parametrize(("versions", "expected"), [("exact", [0, 0, 0]), ("latest", [0, 0, 1])])
def test_a_handed_out_shard_takes_the_newest_version(
    start: Callable[..., Run], versions: str, expected: list[int]
) -> None:
    """eta = 2, and version 1 is published while step 1 is being generated."""
    run = start(steps=3, staleness=2, **{"rollout.versions": versions})
    held = hold_step_1(run)
    run.then(lambda: run.ledger.find(Address("publish", 1)), lambda: [file.unlink() for file in held])
    run.go()
    run.assert_whole()
    assert [generated_with(run, step) for step in range(3)] == [[version] * SHARDS for version in expected]


def test_what_a_dead_replica_had_takes_the_newest_version_then(start: Callable[..., Run]) -> None:
    """The other replica's shard continues as it is."""
    run = start(steps=3, staleness=2, **{"rollout.versions": "latest"})
    held = hold_step_1(run)
    killed: list[str] = []

    def kill() -> None:
        killed.append(run.first_at(Address("generate", 1)))
        run.kill(killed[0])()

    def built_again() -> bool:
        return sum(line[0] == killed[0] for line in run.log("built")) == 2

    run.then(lambda: run.ledger.find(Address("publish", 1)), kill)
    run.then(built_again, lambda: [file.unlink() for file in held])
    run.go()
    run.assert_whole()
    lost = [run.first_at(Address("generate", 1, shard)) == killed[0] for shard in range(SHARDS)]
    assert sorted(lost) == [False, False, True, True]
    assert generated_with(run, 1) == [int(one) for one in lost]
