"""Configs against clusters that are not here: which node and GPU each worker gets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config.hardware import read_cluster
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.launch.target_cluster import TargetCheck, check_target
from stages.models.spec import read_config
from tests.support.paths import ROOT

TINY = str(ROOT / "conf/run/tiny.yaml")
GANGS = (
    "placement.gangs={generate: {workers: 4}, train: {workers: 12, layout: {tensor: 4}}, score: {workers: 2}}",
    "rollout={rows: 96, shards: 2}",
    "ppo={epochs: 1, minibatches: 2}",
)
ATTACHED = "cluster.kind=attached"


def config(*changes: str) -> RunConfig:
    return load_config([TINY], changes)


def checked(text: str, *changes: str) -> TargetCheck:
    return check_target(config(*changes), read_cluster(text), text)


def nodes(found: TargetCheck, gang: str) -> list[str]:
    return [node for (name, _), node in sorted(found.hosts.items()) if name == gang]


def test_a_local_run_is_on_one_node() -> None:
    found = checked("4x8xH100-80")
    assert {*found.hosts.values()} == {"node 0"}
    assert found.devices["generate", 0] != found.devices["train", 0]
    assert any("one of the 4 nodes" in note for note in found.notes)


def test_attached_tensor_ranks_stay_together_and_replicas_fill_the_gaps() -> None:
    """12 ranks in groups of 4: a node of 6 GPUs holds one group, and beside it two replicas."""
    found = checked("3x6xH100-80", *GANGS, ATTACHED)
    assert nodes(found, "train") == ["node 0"] * 4 + ["node 1"] * 4 + ["node 2"] * 4
    assert nodes(found, "generate") == ["node 0", "node 0", "node 1", "node 1"]
    assert nodes(found, "score") == ["node 0", "node 0"]
    assert found.devices["score", 0] == ()
    assert found.devices["train", 5] == (1,)


def test_large_attached_groups_go_first_where_small_ones_would_leave_no_room() -> None:
    """8 ranks, if they came first, would leave 1 and 3 GPUs on two nodes of 3: room for one replica of two ranks."""
    gangs = "placement.gangs={generate: {workers: 2}, train: {workers: 8}, score: {}}"
    model = f"model.path={ROOT / 'conf/model/llama-3.1-8b'}"
    wide = (model, "model.dtype=bfloat16", "engine.kind=vllm", "engine.python=python", "engine.tensor_parallel=2")
    found = checked("4x3xH100-80", gangs, *GANGS[1:], *wide, ATTACHED)
    assert nodes(found, "generate") == ["node 0", "node 1"]
    assert nodes(found, "train") == ["node 0", "node 1"] + ["node 2"] * 3 + ["node 3"] * 3


def test_gangs_that_take_turns_begin_at_the_same_place() -> None:
    found = checked("2x8xH100-80", *GANGS, ATTACHED, "placement.device_sharing=[[train,generate]]")
    assert nodes(found, "train") == ["node 0"] * 8 + ["node 1"] * 4
    assert nodes(found, "generate") == ["node 0"] * 4


def test_a_job_has_the_nodes_that_slurm_would_give() -> None:
    shape = "slurm.gangs={train: {nodes: 3}, generate: {nodes: 1}, score: {beside: generate}}"
    found = checked("4x8xH100-80", *GANGS, shape)
    assert nodes(found, "train") == ["node 0"] * 4 + ["node 1"] * 4 + ["node 2"] * 4
    assert nodes(found, "generate") == ["node 3"] * 4
    with pytest.raises(ConfigError) as refused:
        checked("3x8xH100-80", *GANGS, shape)
    assert refused.value.key == "slurm.gangs"
    with pytest.raises(ConfigError) as refused:
        checked("4x2xH100-80", *GANGS, shape)
    assert {error.key for error in refused.value.errors} == {"slurm.gangs.train.nodes", "slurm.gangs.generate.nodes"}


def test_nodes_without_gpus_are_filled_by_cores() -> None:
    found = checked("4xcpu", *GANGS, ATTACHED, "placement.gangs.generate.threads=56")
    assert nodes(found, "generate") == ["node 0", "node 0", "node 1", "node 1"]
    assert found.devices["train", 0] == ()


@pytest.mark.parametrize(
    ("text", "changes", "key"),
    [
        ("1x8xH100-80", GANGS, "placement.gangs.train.workers"),
        ("1x8xH100-80", (*GANGS, ATTACHED), "placement.gangs"),
        ("24x1xH100-80", (*GANGS, ATTACHED), "placement.gangs.train.layout.tensor"),
        ("2x8xH100-80", (*GANGS, ATTACHED, "placement.gangs.generate.workers=5"), "placement.gangs"),
        ("2x7xH100-80", (*GANGS, ATTACHED, "placement.gangs.generate.workers=2"), "placement.gangs.train.workers"),
        ("2x8xH100-80", (*GANGS, "placement.gangs.train.layout.tensor=12"), "placement.gangs.train.layout.tensor"),
        ("8xH100-80", ("prompts.max_tokens=400",), "prompts.max_tokens"),
        ("2xcpu", ("model.tf32=true",), "model.tf32"),
        ("8xH100-80", ("model.path=nowhere",), "model.path"),
    ],
)
def test_what_cannot_work_there_is_refused(text: str, changes: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(text, *changes)
    assert refused.value.key == key


def test_too_little_memory_of_a_gpu_a_host_or_dev_shm_is_a_problem(tmp_path: Path) -> None:
    large = ("model.path=random:8b-shape", "model.dtype=bfloat16", "engine.dtype=bfloat16")
    alone = ("placement.gangs.train.workers=1", *large)
    assert {problem.key for problem in checked("8xH100-80", *alone).problems} == {"placement.gangs.train.workers"}
    own = tmp_path / "small.yaml"
    hardware = (ROOT / "conf/hardware/B200.yaml").read_text("utf8").replace("178.3", "900")
    own.write_text(hardware.replace("host_memory_gib: 1862", "host_memory_gib: 60").replace("gib: 931", "gib: 40"))
    keys = {problem.key for problem in checked(f"8x{own}", *alone).problems}
    assert keys == {"placement.gangs.train.workers", "cluster.weights_dir"}


def test_gangs_that_share_the_only_gpu_are_named() -> None:
    roles = "placement.roles={generate: all, score: train, reference: train, policy: train, critic: train}"
    apart = ("placement.gangs={all: {}, train: {}}", roles)
    assert any("share their host's only GPU" in note for note in checked("1xH100-80", *apart).notes)
    for text, changes in (("8xH100-80", apart), ("1xH100-80", (*apart, "placement.device_sharing=[[all,train]]"))):
        assert not any("only GPU" in note for note in checked(text, *changes).notes)


def test_a_config_json_is_enough_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config("random:8b-shape")))
    found = checked("8xB200", f"model.path={tmp_path}", "model.dtype=bfloat16", "engine.kv_budget_mb=1024")
    assert found.run.model.stored_bytes == 2 * 8_030_261_248
    assert any("has no weights here" in note for note in found.notes)


def test_the_command_prints_the_tables_and_refuses_a_runs_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["check", TINY, "--as", "8xH100-80"]) == 0
    shown = capsys.readouterr().out
    for heading in ("placement", "predicted memory of a worker", "predicted memory of a host", "would fit"):
        assert heading in shown
    large = ("model.path=random:70b-shape", "engine.kv_budget_mb=1024")
    assert main(["check", TINY, "staleness=2", "--as", "8xH100-80", *large]) == 2, "changes before and after"
    assert "moments" in capsys.readouterr().out, "the numbers stand above the refusal"
    assert main(["check", str(tmp_path), "--as", "8xH100-80"]) == 2
