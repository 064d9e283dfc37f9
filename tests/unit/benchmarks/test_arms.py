"""The configs of the benchmarks' arms. `tests/integration/test_benchmarks.py` runs a few of them, since a run takes ten
seconds; here all are read and validated."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ablation, overlap
from pipeline.config.loading import load_config
from tests.support.paths import ROOT

pytestmark = pytest.mark.smollm2


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the configs begin at the repository."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "arm", [arm for arm in ablation.ARMS if arm.placement or arm.changes], ids=lambda arm: arm.name
)
def test_every_run_of_the_ablation_is_valid(arm: ablation.Arm, tmp_path: Path) -> None:
    bench = ablation.Bench(tmp_path, 2, [], 0)
    for dtype in ablation.DTYPES:
        config = bench.config(arm, dtype, 0)
        assert (config.model.dtype, config.steps) == (dtype, ablation.WARM_UP + 2 + config.staleness)


@pytest.mark.parametrize(
    ("workload", "arm"),
    [
        pytest.param(workload, arm, id=f"{workload}: {arm.name}")
        for workload in overlap.WORKLOADS
        for arm in (overlap.BESIDE if workload == overlap.PIPELINES else overlap.ARMS)
    ],
)
def test_every_schedule_of_the_overlap_is_valid(workload: str, arm: overlap.Arm) -> None:
    changes = [*overlap.WORKLOADS[workload], *arm.overrides, f"staleness={arm.staleness}"]
    assert load_config(["conf/run/demo.yaml"], changes).staleness == arm.staleness
