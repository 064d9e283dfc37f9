"""The runtime of a worker: what is bound to a stage runs, and a node's output is computed and committed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.loading import load_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import preflight
from pipeline.graph.graph import STAGE_ROLES
from pipeline.workers.bindings.binding import Computed, Output, SelfCommitting, Settled
from pipeline.workers.bindings.registry import STAGES, UnboundStage, register
from pipeline.workers.messages import Call, WorkerSpec
from pipeline.workers.parts import WorkerParts
from pipeline.workers.runtime import StageRuntime
from stages.models.protocol import Role
from storage.address import Address
from storage.records import Scores

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerSpec]:
    """A worker that scores, of a run that has its prompts."""
    monkeypatch.chdir(ROOT)
    config = load_config([ROOT / "conf/run/tiny.yaml"], [f"runs_dir={tmp_path}", f"cluster.weights_dir={tmp_path}"])
    config.run_dir.mkdir()
    preflight(config).prompts.save(RunPaths(config.run_dir).prompts)
    threads = torch.get_num_threads()
    yield WorkerSpec("score", 0, 1, 0, "", "", to_yaml(config))
    torch.set_num_threads(threads)  # a worker sets its own


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graph has a stage of its own, and gets its registry back."""
    monkeypatch.setitem(STAGE_ROLES, "judge", Role.SCORE)
    yield
    STAGES.pop("judge", None)


def judged(parts: WorkerParts, call: Call) -> Output:
    assert parts.scorer is not None
    scores = parts.scorer.reward([])
    return Output(Scores(np.arange(8, dtype=np.float32)), {"judge/given": float(len(scores))})


def judge(spec: WorkerSpec) -> Call:
    return Call(Address("judge", 0, 1), "a0", 0, (), spec.gang, spec.name, spec.incarnation)


def test_a_stage_that_nothing_runs_is_refused_before_anything_is_built(spec: WorkerSpec, extended: None) -> None:
    with pytest.raises(
        UnboundStage, match=r"stage 'judge' of the graph has no binding: .*registry\.py \(bound are gen"
    ):
        StageRuntime(spec)


def test_a_stage_from_elsewhere_is_computed_and_committed_once(spec: WorkerSpec, extended: None) -> None:
    runs = []

    def counted(parts: WorkerParts, call: Call) -> Output:
        runs.append(call.address)
        return judged(parts, call)

    register("judge", Computed(counted))
    call = judge(spec)
    with closing(StageRuntime(spec)) as runtime:
        first, again = runtime.run(call), runtime.run(call)
        assert runs == [call.address]
        assert (first.reused, again.reused) == (False, True)
        assert first.ref is not None
        assert again.ref == first.ref
        assert first.ref.metrics == {"judge/given": 0.0}
        np.testing.assert_array_equal(runtime.parts.read(call.address).scores, np.arange(8))
        output = runtime.compute(call)
        assert output.record is not None
        assert len(runs) == 2


def test_a_stage_may_commit_by_itself(spec: WorkerSpec, extended: None) -> None:
    """Then the runtime asks no ledger; and it cannot be computed without being committed."""
    calls = []

    def settle(parts: WorkerParts, call: Call) -> Settled:
        calls.append(call)
        return Settled(parts.store.commit_only(call.address, parts.provenance(call, 0.0, ())), reused=len(calls) > 1)

    register("judge", SelfCommitting(settle))
    call = judge(spec)
    with closing(StageRuntime(spec)) as runtime:
        first, again = runtime.run(call), runtime.run(call)
        assert (first.reused, again.reused) == (False, True)
        assert first.ref == again.ref
        assert len(calls) == 2
        with pytest.raises(AssertionError, match="judge cannot be computed without being committed"):
            runtime.compute(call)


def test_a_worker_has_what_its_roles_need_and_nothing_else(spec: WorkerSpec) -> None:
    with closing(StageRuntime(spec)) as runtime:
        parts = runtime.parts
        assert parts.scorer is not None
        assert parts.prompts is not None
        assert (parts.engine, parts.rows, parts.updates) == (None, None, None)
        call = Call(Address("logprob", 0, 0), "a0", 0, (), spec.gang, spec.name, spec.incarnation)
        with pytest.raises(AssertionError, match="built for other roles"):
            runtime.run(call)
