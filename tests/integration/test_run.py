"""The whole graph on a tiny random model, with real processes: how stale a run's data is, what it writes down, and that
every command can read what it left."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import zarr
from mlflow.tracing.client import TracingClient
from mlflow.tracking import MlflowClient

from pipeline.cli.main import main
from pipeline.cli.replay import replay_node
from pipeline.cli.verification import verify_run
from pipeline.config.identity import read_identity, write_identity
from pipeline.config.loading import flatten
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.driver.tracked import tracked_params
from pipeline.errors import ConfigError
from pipeline.graph.graph import run_nodes
from pipeline.observe.journal import EventKind, read_events
from pipeline.observe.metric_catalogue import find_metric
from stages.engines.capabilities import Capabilities, Device, embedded_capabilities
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from storage.address import Address
from tests.support.run_results import steps_of
from tests.support.runs import ONE_GANG, QUIET, arguments, finish_in, placement

pytestmark = pytest.mark.processes

STEPS = 4
FULL = pytest.mark.full
"""Marks the tests that need more than two of this file's runs; unit tests hold the same rules in `make test`."""
KEYS = {
    "steps", "wall_s", "samples_per_s", "tokens_per_s", "stage_s", "overhead_fraction", "staleness", "eval", "reward",
    "kl", "versions",
}  # fmt: skip
EXTRA_KEYS = {
    "overlap_fraction", "busiest_gang", "idle", "alarms", "alarms_by_rule", "kl_final", "distinct_bigrams",
    "trainer_losses", "trainer_lost_s", "evaluations", "best", "hints", "predictions",
}  # fmt: skip


@pytest.fixture(scope="module")
def synchronous(folder: Path) -> RunConfig:
    """eta = 0, every role in one process."""
    return finish_in(folder, "synchronous", "staleness=0", ONE_GANG, *QUIET)


@pytest.fixture(scope="module")
def stale(folder: Path) -> RunConfig:
    """eta = 2; policy and critic on gangs of their own; no forward for the proximal policy."""
    gangs = placement("{engine: {}, actor: {}, critic: {}}", generate="engine", score="engine", policy="actor",
                      others="critic")  # fmt: skip
    return finish_in(folder, "stale", "staleness=2", gangs, "ppo.proximal=loglinear", *QUIET)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> RunConfig:
    """Two data-parallel ranks, in bfloat16; the proximal policy is the sampler."""
    gangs = placement("{pool: {}, train: {workers: 2}}", generate="pool", score="pool", others="train")
    changes = ("steps=2", "ppo.proximal=sampler", "model.dtype=bfloat16", "model.frozen_blocks=1", "evaluate.every=0")
    return finish_in(folder, "ranks", gangs, *changes, *QUIET)


@FULL
def test_weights_that_come_in_flight_keep_the_bound(folder: Path) -> None:
    """Shards of two steps share a replica while weights change; an evaluation is of its own version only."""
    changes = ("rollout.versions=inflight", "sampling.min_new_tokens=6")
    config = finish_in(folder, "inflight", *changes, *QUIET)
    report = verify_run(config)
    assert report.faults == []
    history = open_history(config)
    for step, rollout in enumerate(steps_of(config, "generate")):
        versions = np.unique(rollout.token_versions[rollout.response_mask]).tolist()
        assert max(0, step - 1) <= versions[0] <= versions[-1] <= step
        commits = [history.ledger.find(Address("generate", step, s)) for s in range(config.rollout.shards)]
        assert {v for c in commits if c is not None for v in c.provenance.weight_versions} == set(versions)
    for evaluation in history.read_evaluations():
        rollout, _ = history.read_evaluated_rows(evaluation.version)
        assert set(rollout.token_versions[rollout.response_mask].tolist()) == {evaluation.version}


@FULL
def test_engines_read_adapters_merged(folder: Path) -> None:
    """With LoRA the engine's weights are the trainer's W with the adapters merged."""
    changes = ("staleness=0", "model.lora.rank=4", "model.policy.lr=1e-2", "model.frozen_blocks=1", ONE_GANG)
    config = finish_in(folder, "adapters", *changes, *QUIET)
    assert verify_run(config).faults == []
    rollouts, policies = steps_of(config, "generate"), steps_of(config, "logprob")
    references = steps_of(config, "reference")
    moved = []
    for rollout, policy, reference in zip(rollouts, policies, references, strict=True):
        mask = rollout.response_mask
        assert np.abs(policy.policy_logprobs - rollout.sampler_logprobs)[mask].mean() <= 1e-4
        moved.append(np.abs(policy.policy_logprobs - reference.ref_logprobs)[mask].max())
    assert moved[0] == 0
    assert moved[-1] > 1e-3
    exported = RunPaths(config.run_dir).weights(config.steps)
    assert (exported / "adapter/adapter_model.safetensors").is_file()


# ---- staleness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("synchronous", [0, 0, 0, 0]),
        ("overlapped", [0, 1, 1, 1]),
        pytest.param("stale", [0, 1, 2, 2], marks=FULL),
        pytest.param("ranks", [0, 1], marks=FULL),
    ],
)
def test_rows_are_as_stale_as_the_graph_says(request: pytest.FixtureRequest, name: str, expected: list[int]) -> None:
    config: RunConfig = request.getfixturevalue(name)
    for step, rollout in enumerate(steps_of(config, "generate")):
        age = step - rollout.token_versions[rollout.response_mask]
        assert set(age.tolist()) == {expected[step]}
        assert rollout.response_mask.any(axis=1).all(), "a row without a sampled token has no staleness"
    rows = config.rollout.rows
    summary = json.loads(RunPaths(config.run_dir).summary.read_text())
    histogram = {str(a): expected.count(a) * rows for a in sorted(set(expected))}
    assert summary["staleness"] == {"max": max(expected), "mean": sum(expected) / len(expected), "histogram": histogram}


def test_fresh_data_has_the_trainers_log_probs(synchronous: RunConfig) -> None:
    """eta = 0: engine and trainer hold the same weights, so log-probs agree and the first ratio is 1."""
    history = open_history(synchronous)
    for step, (rollout, policy) in enumerate(
        zip(steps_of(synchronous, "generate"), steps_of(synchronous, "logprob"), strict=True)
    ):
        difference = np.abs(policy.policy_logprobs - rollout.sampler_logprobs)[rollout.response_mask]
        assert difference.mean() <= 1e-4
        assert difference.max() > 0 or step == 0, "two programs agree to the last bit: is one of them the other?"
        metrics = history.read_step_metrics(step)
        assert metrics["policy/ratio_deviation_first"] <= 1e-5
        assert metrics["staleness/max"] == 0


def test_stale_data_has_other_log_probs(overlapped: RunConfig) -> None:
    """The counterpart of the test above: with eta = 1 the weights differ, and the numbers show it. (Step 0 earns no
    reward with this seed: version 1 is version 0.)"""
    means = [
        float(np.abs(p.policy_logprobs - r.sampler_logprobs)[r.response_mask].mean())
        for r, p in zip(steps_of(overlapped, "generate"), steps_of(overlapped, "logprob"), strict=True)
    ]
    assert means[0] <= 1e-4
    assert min(means[2:]) > 1e-2


@FULL
def test_without_recompute_there_are_no_logprob_nodes(stale: RunConfig, ranks: RunConfig) -> None:
    for config in (stale, ranks):
        history = open_history(config)
        assert history.ledger.list("logprob") == []
        assert len(history.ledger.list("update_policy")) == config.steps


# ---- what is written down ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["overlapped", "synchronous", *(pytest.param(name, marks=FULL) for name in ("stale", "ranks"))]
)
def test_the_directory_is_sound(request: pytest.FixtureRequest, name: str) -> None:
    config: RunConfig = request.getfixturevalue(name)
    report = verify_run(config)
    assert report.faults == []
    nodes = [node.address for node in run_nodes(config.graph())]
    assert sum(report.num_commits.values()) == len(nodes)
    assert sorted(c.address for c in open_history(config).ledger.list()) == sorted(nodes)
    assert not list(config.run_dir.glob("attempts/*"))
    assert not RunPaths(config.run_dir).board(None).exists(), "published weights were left in memory"


def test_every_node_is_in_the_journal(overlapped: RunConfig) -> None:
    events = list(read_events(RunPaths(overlapped.run_dir).events))
    assert (events[0].kind, events[-1].kind) == (EventKind.RUN_STARTED, EventKind.RUN_FINISHED)
    nodes = {node.address for node in run_nodes(overlapped.graph())}
    for kind in (EventKind.SUBMITTED, EventKind.STARTED, EventKind.FINISHED):
        reported = [Address(e.stage or "", e.step or 0, e.shard or 0) for e in events if e.kind is kind]
        assert sorted(reported) == sorted(nodes), kind
    assert [e.step for e in events if e.kind is EventKind.PUBLISHED] == list(range(STEPS + 1))
    assert {e.gang for e in events if e.kind is EventKind.GANG_BUILT} == {"generate", "score", "train"}
    assert not [e for e in events if e.kind in (EventKind.FAILED, EventKind.GANG_LOST)]
    (said,) = [e.detail for e in events if e.kind is EventKind.ENGINE]
    assert (said or "").startswith("engine embedded on cpu: ")
    assert (said or "").endswith("Not proven: nothing")
    assert any(note.startswith("engine embedded on cpu: ") for note in verify_run(overlapped).notes)


def test_a_run_on_a_gpu_is_held_to_less(overlapped: RunConfig, tmp_path: Path) -> None:
    """By what was stated of its workers, wherever it is looked at."""
    copy = tmp_path / overlapped.name
    shutil.copytree(overlapped.run_dir, copy)
    config = replace(overlapped, runs_dir=str(tmp_path))
    identity = read_identity(copy)
    on_gpu = [replace(n, items={**n.items, "device": "H100"}) if n.gang == "generate" else n for n in identity.numerics]
    write_identity(copy, replace(identity, numerics=tuple(on_gpu)))
    again = replay_node(config, "generate", 0, 0)
    assert again.tolerance > 0
    assert any("tie of rounding" in line for line in again.unproven)
    assert any(note.startswith("not proven: the run repeats to rounding") for note in verify_run(config).notes)


def test_a_replay_of_unkeyed_draws_is_refused(overlapped: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(config: EngineConfig, device: Device) -> Capabilities:
        return replace(embedded_capabilities(config, device), draws="seeded")

    monkeypatch.setattr("stages.engines.capabilities.STATED", {"embedded": seeded})
    for stage in ("generate", "evaluate"):
        with pytest.raises(ConfigError, match=r"--stage: given .* draws are seeded.* What can be replayed: score"):
            replay_node(overlapped, stage, 0, 0)


def test_the_summary_has_what_is_compared_between_runs(overlapped: RunConfig) -> None:
    summary = json.loads(RunPaths(overlapped.run_dir).summary.read_text())
    assert summary.keys() == KEYS | EXTRA_KEYS
    assert summary["steps"] == STEPS
    assert summary["staleness"].keys() == {"max", "mean", "histogram"}
    assert summary["eval"].keys() == {"before", "after", "num_prompts", "paired_t"}
    assert summary["eval"]["num_prompts"] == 8
    assert (len(summary["reward"]), len(summary["kl"])) == (STEPS, STEPS)
    assert summary["kl"][0] == pytest.approx(0, abs=1e-3)
    assert summary["stage_s"].keys() == {node.stage for node in run_nodes(overlapped.graph())}
    assert summary["versions"]["weights"] == STEPS + 1
    assert summary["alarms"] == 0
    assert summary["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert 0 <= summary["overhead_fraction"] <= 1
    scores = [float(record.scores.mean()) for record in steps_of(overlapped, "score")]
    assert summary["reward"] == pytest.approx(scores)
    tokens = sum(int(r.response_lengths.sum()) for r in steps_of(overlapped, "generate"))
    assert summary["tokens_per_s"] * summary["wall_s"] == pytest.approx(tokens)
    assert summary["samples_per_s"] * summary["wall_s"] == pytest.approx(STEPS * overlapped.rollout.rows)


def test_the_report_is_written_at_the_end(overlapped: RunConfig) -> None:
    """tests/browser tests its contents; here: the whole run is in it, and its user."""
    text = RunPaths(overlapped.run_dir).report.read_text("utf8")
    found = re.search(r'id="contents">(.*?)</script>', text, re.DOTALL)
    (shown,) = json.loads(found[1])["runs"]
    assert shown["state"] == f"finished: {STEPS} steps"
    assert shown["curves"]["steps"] == list(range(STEPS))
    assert shown["samples"]["of_rows"] == STEPS * overlapped.rollout.rows
    assert len(shown["timeline"]["step"]) == len(list(run_nodes(overlapped.graph())))
    assert {fact["label"] for fact in shown["facts"]} >= {"command", "driver's host", "workers' hosts", "software"}


def test_plain_zarr_opens_the_rollouts(overlapped: RunConfig) -> None:
    group = zarr.open_group(str(overlapped.run_dir / "rollouts.zarr"), mode="r")
    names = [f"step_{step:06d}" for step in range(STEPS)] + [f"evaluate_{version:06d}" for version in (0, 2, 4)]
    assert sorted(group.group_keys()) == sorted(names)
    assert sorted(group.array_keys()) == ["vocabulary_bytes", "vocabulary_offsets"]
    for step, rollout in enumerate(steps_of(overlapped, "generate")):
        for name, array in rollout.arrays().items():
            np.testing.assert_array_equal(np.asarray(group[f"step_{step:06d}/{name}"]), array)
    fields = {"scores", "ref_logprobs", "policy_logprobs", "values", "rewards", "advantages", "returns", "loss_mask"}
    assert fields <= set(group["step_000000"].keys())  # type: ignore[union-attr]


def test_exported_weights_load_in_transformers(overlapped: RunConfig, tmp_path: Path) -> None:
    """They give the engine's log-probs of the same text, and differ from the start weights."""
    directory = RunPaths(overlapped.run_dir).weights(STEPS)
    assert sorted(path.name for path in directory.parent.iterdir()) == ["v000002", "v000004"]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    settings = EngineConfig(max_rows=2, kv_budget_mb=16)
    engine = build_embedded(str(directory), settings, max_seq=32, threads=1, eos_token_ids=[])
    try:
        sampling = SamplingConfig(max_new_tokens=8, temperature=1.0)
        (completion,) = engine.generate([Request(0, 0, 0, tuple(b"green tea"), engine.version, sampling)])
    finally:
        engine.close()
    ids = torch.tensor([[*b"green tea", *completion.tokens.tolist()]])
    with torch.no_grad():
        logprobs = model(ids).logits.float().log_softmax(-1)[0, 8:-1]
    theirs = logprobs.gather(1, ids[0, 9:, None])[:, 0].numpy()
    np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4)
    versions = [
        transformers.AutoModelForCausalLM.from_pretrained(directory.parent / name).state_dict()["model.norm.weight"]
        for name in ("v000002", "v000004")
    ]
    assert not torch.equal(versions[0], versions[1])


def _prompts_digest(config: RunConfig) -> str:
    identity = read_identity(config.run_dir)
    return identity.prompts[:36]


def test_mlflow_has_the_run(overlapped: RunConfig) -> None:
    client = MlflowClient(overlapped.tracking.uri)
    experiment = client.get_experiment_by_name("stageline")
    own = f"attributes.run_name = '{overlapped.name}'"  # variants of it, which other tests train, are there too
    (run,) = client.search_runs([experiment.experiment_id], own)
    assert run.info.status == "FINISHED"
    assert run.data.params == tracked_params(overlapped) | {"runs_dir": "runs"}
    assert run.data.params.items() <= (flatten(overlapped) | {"runs_dir": "runs"}).items()
    assert {"host", "config_hash", "run_dir", "mlflow.user", "mlflow.source.name"} <= run.data.tags.keys()
    assert run.data.tags["engine"].startswith(
        "engine embedded on cpu: draws are keyed; other rows of a batch change no bit"
    )
    assert run.data.tags["not_proven"] == "nothing"
    assert run.data.tags["stageline.ended"] == "finished"
    assert "**Result:** finished after 4 steps" in run.data.tags["mlflow.note.content"]
    assert {d.dataset.digest for d in run.inputs.dataset_inputs} == {_prompts_digest(overlapped)}
    promised = {
        "reward/mean", "kl/ref", "eval/gain", "staleness/max", "staleness/mean", "ess/fraction", "time/step_s",
        "time/generate_s", "time/update_policy_s", "samples_per_s", "tokens_per_s", "overlap",
        "policy/clipfrac", "critic/explained_variance", "eval/reward_mean", "mismatch/canary_mean_abs",
    }  # fmt: skip
    assert promised <= run.data.metrics.keys()
    unknown_files = {name for name in run.data.metrics if find_metric(name) is None}
    assert not unknown_files, "docs/metrics.md names every metric"
    assert not {"kl/coef", "score/mean", "policy/skipped_steps", "mismatch/mean_abs"} & run.data.metrics.keys()
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward/mean")] == list(range(STEPS))
    assert [m.step for m in client.get_metric_history(run.info.run_id, "eval/reward_mean")] == [0, 2, 4]
    steps = open_history(overlapped)
    reported = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "reward/mean")}
    assert reported == {step: steps.read_step_metrics(step)["reward/mean"] for step in range(STEPS)}
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "summary.json", "samples.json", "plots"} <= artifacts
    plots = {file.path for file in client.list_artifacts(run.info.run_id, "plots")}
    assert plots == {"plots/curves.png", "plots/timeline.png", "plots/report.html"}


def test_mlflow_has_a_trace_per_step_with_true_times(overlapped: RunConfig) -> None:
    client = MlflowClient(overlapped.tracking.uri)
    experiment = client.get_experiment_by_name("stageline")
    assert overlapped.tracking.uri is not None
    traces = TracingClient(overlapped.tracking.uri).search_traces(locations=[experiment.experiment_id])
    spans = {t.info.tags["step"]: [s for s in t.data.spans if s.outputs and s.parent_id] for t in traces}
    assert {"0", "1", "2", "3"} <= spans.keys()
    finished = {
        f"{Address(e.stage or '', e.step or 0, e.shard or 0)}": (e.t - (e.seconds or 0), e.t)
        for e in read_events(RunPaths(overlapped.run_dir).events)
        if e.kind is EventKind.FINISHED
    }
    outputs = [span.outputs for of_step in spans.values() for span in of_step]
    assert sorted(outputs) == sorted(finished)
    assert {"generate s0", "generate s1", "advantage", "publish v3"} <= {span.name for span in spans["2"]}
    third = next(t for t in traces if t.info.tags["step"] == "2")
    assert third.info.request_preview == "overlapped · step 2 · v1"
    assert str(third.info.response_preview).startswith("reward 0.")
    assert {s.name for s in third.data.spans if not s.outputs} == {"generate", "score", "train"}
    for span in (span for of_step in spans.values() for span in of_step):
        times = (span.start_time_ns / 1e9, (span.end_time_ns or 0) / 1e9)
        assert times == pytest.approx(finished[span.outputs], abs=1e-3)
    generated = finished["generate/step_000002/shard_0000"]
    assert generated[1] <= finished["update_policy/step_000002/shard_0000"][0]


# ---- the commands --------------------------------------------------------------------------------------------------


def test_check_finds_a_flipped_bit(synchronous: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(synchronous.run_dir)
    assert main(["check", run_dir]) == 0
    assert "sound" in capsys.readouterr().out
    victim = synchronous.run_dir / "rollouts.zarr" / "step_000001/scores/c.0"
    whole = victim.read_bytes()
    try:
        victim.write_bytes(whole[:8] + bytes([whole[8] ^ 1]) + whole[9:])
        assert main(["check", run_dir]) == 2
        assert "score/step_000001/shard_0000" in "".join(capsys.readouterr().out.split())
    finally:
        victim.write_bytes(whole)


def test_inspect(overlapped: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # as through a pipe
    assert main(["inspect", str(overlapped.run_dir), "--step", "1", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    for heading in ("prompt", "response", "score", "KL", "version", "advantage"):
        assert heading in out
    assert "nodes of step 1" in out
    assert re.search(r"generate s1 +│ generate-0", out)
    assert re.search(r"update_policy +│ train-0", out)
    assert "…" not in out, "nothing is cut"
    assert main(["inspect", str(overlapped.run_dir), "--step", "4"]) == 2
    assert "--step: given 4; the run has steps 0 to 3" in capsys.readouterr().err
    assert main(["inspect", str(overlapped.run_dir), "--rows", "-2"]) == 2
    assert "--rows: given -2; must be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "step"),
    [
        ("score", 1), ("advantage", 3), ("reference", 1), ("logprob", 2), ("value", 2), ("update_policy", 2),
        ("update_critic", 1), ("evaluate_score", 4),
    ],
)  # fmt: skip
def test_replay_of_a_stage_is_equal(
    overlapped: RunConfig, capsys: pytest.CaptureFixture[str], stage: str, step: int
) -> None:
    before = sorted(path for path in overlapped.run_dir.rglob("*"))
    assert main(["replay", str(overlapped.run_dir), "--step", str(step), "--stage", stage]) == 0
    assert "identical: difference must be 0" in capsys.readouterr().out
    assert sorted(path for path in overlapped.run_dir.rglob("*")) == before, "a replay writes nothing to the run"


@pytest.mark.parametrize(("stage", "step", "shard"), [("generate", 3, 1), ("evaluate", 2, 0)])
def test_replay_of_sampling_gives_the_same_tokens(
    overlapped: RunConfig, capsys: pytest.CaptureFixture[str], stage: str, step: int, shard: int
) -> None:
    arguments = ["--step", str(step), "--stage", stage, "--shard", str(shard)]
    assert main(["replay", str(overlapped.run_dir), *arguments]) == 0
    out = capsys.readouterr().out
    tokens = next(line.replace("│", " ").split() for line in out.splitlines() if " tokens " in line)
    assert tokens[2] == "0"
    assert "identical: difference must be 0" in out  # by what the engine can do on a CPU, log-probs too


@FULL
def test_replay_on_another_layout_says_so(ranks: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(ranks.run_dir), "--step", "1", "--stage", "value"]) == 0
    assert "floats may differ" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "0", "--stage", "publish"], "--stage: given 'publish'; must be one of generate, score"),
        (["--step", "4", "--stage", "score"], "--step: given 4; the run has steps 0 to 3"),
        (["--step", "0", "--stage", "score", "--shard", "2"], "--shard: given 2; score has shards 0 to 1"),
        (["--step", "1", "--stage", "evaluate"], "evaluate/step_000001/shard_0000 has no commit"),
    ],
)
def test_replay_refuses_what_is_not_there(
    overlapped: RunConfig, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["replay", str(overlapped.run_dir), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_export_rebuilds_a_version_that_was_not_kept(overlapped: RunConfig, tmp_path: Path) -> None:
    run_dir, target = str(overlapped.run_dir), tmp_path / "v3"
    assert main(["export", run_dir, "--version", "3", "--to", str(target)]) == 0
    v3 = transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()
    v4 = transformers.AutoModelForCausalLM.from_pretrained(RunPaths(overlapped.run_dir).weights(4)).state_dict()
    assert not torch.equal(v3["model.norm.weight"], v4["model.norm.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v3"]
    assert main(["export", run_dir, "--version", "3", "--to", str(target)]) == 2  # it is there already
    assert main(["export", run_dir, "--version", "9", "--to", str(tmp_path / "v9")]) == 2
    assert main(["export", run_dir, "--to", str(tmp_path / "newest")]) == 0
    newest = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "newest").state_dict()
    assert all(torch.equal(newest[name], tensor) for name, tensor in v4.items())


def test_a_second_run_is_refused(overlapped: RunConfig, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = RunPaths(overlapped.run_dir).events.read_bytes()
    assert main(["run", *arguments(folder, "overlapped")]) == 2
    assert "stageline resume" in capsys.readouterr().err
    assert main(["run", *arguments(folder, "overlapped", "seed=5")]) == 2
    refusal = capsys.readouterr().err
    assert "holds a run without these settings: " in refusal
    assert "seed=5" in refusal
    assert RunPaths(overlapped.run_dir).events.read_bytes() == before


def test_resume_of_a_finished_run_starts_nothing(overlapped: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    before = RunPaths(overlapped.run_dir).events.read_bytes()
    assert main(["resume", str(overlapped.run_dir)]) == 0
    assert "held-out reward" in capsys.readouterr().out
    assert RunPaths(overlapped.run_dir).events.read_bytes() == before
