"""A run with drafts is the run without them, and its draft head follows the policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.driver.results import open_history
from stages.models.hf_weights import read_weights
from stages.models.spec import FINAL_NORM
from tests.support.drafting_runtime import LESSONS
from tests.support.run_results import outputs
from tests.support.runs import QUIET, configure, finish, placement, use_runtime

pytestmark = pytest.mark.processes

STEPS = 5
GANGS = placement("{generate: {}, score: {}, train: {}}", generate="generate", score="score", others="train")
RUN = (GANGS, *QUIET, f"steps={STEPS}", "staleness=1", "sampling.max_new_tokens=64", "sampling.min_new_tokens=48",
       "sampling.temperature=0.5", "export.every=1")  # fmt: skip
"""A step has more tokens than the head needs before it is made. At this temperature a random model repeats itself."""


def test_a_run_with_drafts_is_the_run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under staleness 1, with looked-up and with learned drafts: the same tokens, log-probs and weights. The metrics
    of each step say how many drafts were right. The head learns anew from the weights of later versions."""
    without = finish(configure(tmp_path, "without", *RUN))
    use_runtime(monkeypatch, "tests.support.drafting_runtime:DraftingRuntime")
    drafted = finish(configure(tmp_path, "drafted", *RUN, "engine.embedded.speculation.drafter=both"))
    assert outputs(drafted) == outputs(without)
    assert verify_run(drafted).faults == []

    steps = [open_history(drafted).read_step_metrics(step) for step in range(STEPS)]
    for step, metrics in enumerate(steps):
        kinds = {name.rpartition("/")[2] for name in metrics if name.startswith("generate/acceptance/")}
        assert any(kind.startswith(("lookup", "earlier")) for kind in kinds)
        assert "learned" in kinds or step == 0, "the head is made from the first rows"
        lengths = [value for name, value in metrics.items() if name.startswith("generate/draft_length/")]
        assert sum(lengths) == pytest.approx(1.0)
    assert any(metrics["generate/acceptance/learned"] > 0 for metrics in steps[1:])
    assert not any("/acceptance/" in name for name in open_history(without).read_step_metrics(0))

    paths = RunPaths(drafted.run_dir)
    teachers = [json.loads(line) for line in (drafted.run_dir / LESSONS).read_text("utf8").splitlines()]
    versions = [read_weights(str(paths.weights(v)))[FINAL_NORM].tolist() for v in range(1, STEPS)]
    assert sum(norm in teachers for norm in versions) >= 2
