"""Messages between driver and workers, and calls that a worker process refuses."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.workers import entry
from pipeline.workers.entry import Runtime, run_node
from pipeline.workers.messages import Call, Outcome, WorkerLost, WorkerSpec
from storage.address import Address, Ref
from storage.commits import Commit, provenance_here
from storage.ledger import Ledger

SPEC = WorkerSpec("train", 1, 2, 3, "test_calls:Runtime", "name: x")
CALL = Call(Address("value", 4, 2), "a0-x", 4, (Address("generate", 4, 2),), "train", "train-1", 3, sequence=7)


class CountingRuntime(Runtime):
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def run(self, call: Call) -> Outcome:
        self.calls.append(call)
        return Outcome(call.address, call.attempt, Ref(call.address, "a0"), SPEC.name, SPEC.index, 1.0, 2.0, 0.5)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CountingRuntime:
    """This process as it is after `build_worker(SPEC)`."""
    runtime = CountingRuntime()
    monkeypatch.setattr(entry, "_resident", entry._Resident(SPEC, runtime))
    return runtime


def test_errors_survive_the_wire() -> None:
    """Exceptions with arguments of their own are easily ones that cannot be read back."""
    error = pickle.loads(pickle.dumps(WorkerLost("train-1", 3)))
    assert (error.worker, error.incarnation) == ("train-1", 3)


def test_call_runs(runtime: CountingRuntime) -> None:
    assert run_node(CALL).address == CALL.address
    assert runtime.calls == [CALL]


@pytest.mark.parametrize("change", [{"incarnation": 2}, {"incarnation": 4}, {"worker": "train-0"}])
def test_call_for_another_process_is_refused(runtime: CountingRuntime, change: dict[str, object]) -> None:
    call = replace(CALL, **change)
    with pytest.raises(WorkerLost) as lost:
        run_node(call)
    assert (lost.value.worker, lost.value.incarnation) == (call.worker, call.incarnation)
    assert runtime.calls == []


def test_same_attempt_is_refused_the_second_time(runtime: CountingRuntime) -> None:
    """Dask runs a finished task again when its result died with another process. On a trainer that has gone on, that
    would load an old checkpoint, or break the order of a gang."""
    run_node(CALL)
    with pytest.raises(WorkerLost):
        run_node(CALL)
    run_node(replace(CALL, attempt="a1-x"))
    assert [call.attempt for call in runtime.calls] == ["a0-x", "a1-x"]


@pytest.mark.parametrize("again", ["on the same process", "on another incarnation", "on one not built"])
def test_task_that_dask_runs_again_is_answered_from_the_ledger(
    runtime: CountingRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: str
) -> None:
    ledger = Ledger(str(tmp_path))
    provenance = provenance_here(seed=0, config_hash="")
    commit = ledger.commit(Commit(CALL.address, "a0-x", None, 0, {}, provenance, finished=1.0))
    call = replace(CALL, ledger=str(tmp_path))
    if again == "on the same process":
        run_node(call)
    elif again == "on another incarnation":
        call = replace(call, incarnation=2)
    else:
        monkeypatch.setattr(entry, "_resident", None)
    before = len(runtime.calls)
    assert entry.run_node_task(call, "a parent's result") == commit.ref()
    assert len(runtime.calls) == before
    with pytest.raises(WorkerLost):
        entry.run_node_task(replace(call, address=Address("value", 5), incarnation=9))


def test_log_takes_what_native_code_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Descriptors, not sys.stderr: a crash in C++ writes there."""
    log = tmp_path / "logs" / "train-1.log"
    out, err = entry.os.dup(1), entry.os.dup(2)
    try:
        entry._write_to(log, "headline")
        entry.os.write(2, b"a crash\n")
    finally:
        entry.faulthandler.disable()
        entry.os.dup2(out, 1)
        entry.os.dup2(err, 2)
        entry.os.close(out)
        entry.os.close(err)
    assert log.read_text() == "headline\na crash\n"
    assert "a crash" not in capfd.readouterr().err
