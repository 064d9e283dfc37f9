"""Ranges of updates again from stored rollouts, and variants that are trained on them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from storage.address import Address
from storage.ledger import Ledger
from tests.support.runs import QUIET, finish_in

CHANGED = ["ppo.kl.coef=0.5", "model.policy.lr=0.0005"]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture[str]:
    monkeypatch.setenv("COLUMNS", "200")
    return capsys


def summary_of(config: RunConfig, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RunPaths(config.run_dir.parent / name).summary.read_text())
    return found


def test_a_range_of_updates_has_the_committed_digests(overlapped: RunConfig, said: pytest.CaptureFixture[str]) -> None:
    before = sorted(overlapped.run_dir.rglob("*"))
    assert main(["replay", str(overlapped.run_dir), "--updates", "1:4"]) == 0
    lines = said.readouterr().out.splitlines()
    ledger = open_history(overlapped).ledger
    for step in range(1, 4):
        address = Address("update_policy", step)
        digest = ledger.get(address).digest
        assert f"{address}  committed {digest}  replayed {digest}  same" in lines
    assert "critic: from the start weights" in lines
    assert lines[-1] == "identical: updates 1:4 of policy and critic, in this process"
    assert sorted(overlapped.run_dir.rglob("*")) == before, "a replay writes nothing to the run"


MOMENTS = ("model.policy.moments_dtype=bfloat16", "model.critic.moments_dtype=bfloat16")
GRADIENTS = ("model.policy.gradients_dtype=bfloat16", "model.critic.gradients_dtype=bfloat16")
OTHERS = ("model.policy.optimizer=muon", "model.critic.optimizer=adafactor")
STATES = {
    "moments": MOMENTS,
    "both": ("model.dtype=bfloat16", *GRADIENTS, *MOMENTS),
    "optimizers": ("model.dtype=bfloat16", *OTHERS),
}


@pytest.mark.parametrize("what", STATES)
def test_a_run_with_another_state_repeats_itself(folder: Path, what: str, said: pytest.CaptureFixture[str]) -> None:
    """From the start weights, and from the checkpoint of step 2 with its moments."""
    run = str(finish_in(folder, f"state-{what}", "steps=3", *STATES[what], *QUIET).run_dir)
    assert main(["check", run]) == 0
    for updates in ("0:3", "2:3"):
        assert main(["replay", run, "--updates", updates]) == 0
        assert said.readouterr().out.splitlines()[-1].startswith(f"identical: updates {updates} of policy and critic")


def test_difference(overlapped: RunConfig, said: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One update was committed with another digest than its inputs give."""
    find = Ledger.find

    def other(self: Ledger, address: Address) -> Any:
        commit = find(self, address)
        if commit is not None and address == Address("update_critic", 1):
            object.__setattr__(commit, "digest", "0" * 16)
        return commit

    monkeypatch.setattr(Ledger, "find", other)
    assert main(["replay", str(overlapped.run_dir), "--updates", "0:3"]) == 3
    lines = said.readouterr().out.splitlines()
    assert lines[-1] == "first difference: update_critic/step_000001/shard_0000"
    assert sum("update_critic" in line and "committed" in line for line in lines) == 2, "nothing after it"


def test_an_unchanged_variant_has_its_parents_weights(overlapped: RunConfig, said: pytest.CaptureFixture[str]) -> None:
    """One variant begins in the middle of a run, from the parent's weights, moments and controllers."""
    assert main(["replay", str(overlapped.run_dir), "--updates", "2:4", "name=control"]) == 0
    found = summary_of(overlapped, "control")
    ledger = open_history(overlapped).ledger
    for step in found["steps"]:
        for role in ("policy", "critic"):
            committed = ledger.get(Address(f"update_{role}", step["step"])).digest
            assert step["digests"][role] == committed
    assert [step["step"] for step in found["steps"]] == [2, 3]
    assert found["comparison"]["difference"] == 0
    assert found["comparison"]["paired_t"] is None
    history = open_history(overlapped).read_evaluation(4)
    assert found["comparison"]["parent"] == pytest.approx(history.mean)


def test_a_variant_is_its_own_run_and_names_its_parent(overlapped: RunConfig, said: pytest.CaptureFixture[str]) -> None:
    before = sorted(overlapped.run_dir.rglob("*"))
    assert main(["replay", str(overlapped.run_dir), "--updates", "0:4", *CHANGED, "name=variant-a"]) == 0
    out = said.readouterr().out
    assert sorted(overlapped.run_dir.rglob("*")) == before, "the parent is read only"
    assert "held-out reward" in out
    found = summary_of(overlapped, "variant-a")
    assert found["changed"] == ["model.policy.lr=0.0005 (was 0.001)", "ppo.kl.coef=0.5 (was 0.05)"]
    assert found["parent"] == str(overlapped.run_dir.resolve())
    ledger = open_history(overlapped).ledger
    assert found["steps"][-1]["digests"]["policy"] != ledger.get(Address("update_policy", 3)).digest
    assert found["steps"][0]["metrics"]["kl/coef"] == 0.5
    weights = transformers.AutoModelForCausalLM.from_pretrained(found["weights"]).state_dict()
    parents = transformers.AutoModelForCausalLM.from_pretrained(RunPaths(overlapped.run_dir).weights(4)).state_dict()
    assert not torch.equal(weights["model.norm.weight"], parents["model.norm.weight"])
    _assert_tracked(Path(str(overlapped.tracking.uri).removeprefix("sqlite:///")), overlapped)
    page = overlapped.run_dir.parent / "pair.html"
    both = [str(overlapped.run_dir.parent / name) for name in (overlapped.name, "variant-a")]
    assert main(["report", *both, "--out", str(page)]) == 0
    assert "ppo.kl.coef=0.5 (was 0.05)" in page.read_text("utf8")
    for command in (["resume"], ["check"], ["export"], ["replay", "--updates", "0:1"]):
        assert main([command[0], str(overlapped.run_dir.parent / "variant-a"), *command[1:]]) == 2
        assert "holds a variant" in said.readouterr().err


def _assert_tracked(database: Path, parent: RunConfig) -> None:
    with sqlite3.connect(database) as tracked:
        runs = dict(tracked.execute("select name, run_uuid from runs where status = 'FINISHED'").fetchall())
        of_variant = (runs["variant-a"],)
        tags = dict(tracked.execute("select key, value from tags where run_uuid = ?", of_variant).fetchall())
        query = "select step from metrics where key = 'reward/mean' and run_uuid = ? order by step"
        steps = [step for (step,) in tracked.execute(query, of_variant)]
    assert tags["mlflow.parentRunId"] == runs[parent.name]
    assert tags["stageline.parent"] == str(parent.run_dir.resolve())
    assert steps == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--updates", "0:9"], "--updates: given '0:9'; the run has updates 0:4"),
        (["--updates", "3:3"], "write A:B for updates A to B - 1"),
        (["--updates", "0:2", "--stage", "score"], "--updates A:B [changes] for updates"),
        (["--step", "0"], "give --step and --stage for one node"),
        (["--updates", "0:2", "ppo.clip=0.1"], "name: given 'overlapped', the run's own; a variant needs another"),
        *(
            (["--updates", "0:2", "name=x", change], f"{change.split('=')[0]}: given")
            for change in (
                "model.path=elsewhere",
                "sampling.temperature=0.5",
                "prompts.held_out=0",
                "rollout.rows=8",
                "seed=1",
                "staleness=0",
                "steps=9",
                "reward.kind=vader",
            )
        ),
    ],
)
def test_what_a_range_or_a_variant_cannot_be_is_refused(
    overlapped: RunConfig, said: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["replay", str(overlapped.run_dir), *arguments]) == 2
    assert message in said.readouterr().err
    assert not (overlapped.run_dir.parent / "x").exists()
