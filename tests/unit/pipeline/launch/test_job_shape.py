"""The nodes that a run asks for, counted by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.launch.script import NodeGroup, ScriptValues, Step, job_shape, render
from tests.support.paths import TINY

TWO_RANKS = ("placement.gangs.train.workers=2", "placement.gangs.train.threads=3", "slurm.driver_cpus=2")
THREE_NODES = ("slurm.gangs={train: {nodes: 2}, generate: {nodes: 1}, score: {beside: generate}}",)


def load(*changes: str) -> RunConfig:
    return load_config([TINY], changes)


def group(nodes: int, steps: tuple[Step, ...], cpus: int, gpus: int) -> NodeGroup:
    return NodeGroup(nodes, steps, cpus, gpus, partition=None, sbatch=())


def test_without_nodes_of_their_own_all_are_on_the_batch_node() -> None:
    steps = (Step("generate", False, 1, 1, 1), Step("score", False, 1, 1, 0), Step("train", True, 2, 3, 1))
    shape = job_shape(load(*TWO_RANKS))
    assert shape.groups == (group(1, steps, cpus=1 + 1 + 2 * 3 + 2, gpus=1 + 2),)
    assert not shape.heterogeneous


def test_nodes_that_are_alike_make_a_plain_job_with_the_policys_first() -> None:
    """The driver is beside the policy's rank 0, and has its CPUs there."""
    train, engine, scorer = (
        Step("train", True, 2, 3, 1),
        Step("generate", False, 1, 1, 1),
        Step("score", False, 1, 1, 0),
    )
    shape = job_shape(load(*TWO_RANKS, *THREE_NODES))
    assert shape.groups == (group(2, (train,), cpus=3 + 2, gpus=1), group(1, (engine, scorer), cpus=2, gpus=1))
    assert not shape.heterogeneous
    assert (shape.nodes, [shape.first_node(one) for one in shape.groups]) == (3, [0, 2])


@pytest.mark.parametrize(
    "unlike",
    [
        "slurm.gangs.generate.gpus_per_worker=4",
        "slurm.gangs.generate.sbatch=[--constraint=h100]",
        "slurm.gangs.generate.partition=large",
        "slurm.gangs.generate.sbatch=[--mem=0]",
        "slurm.job=heterogeneous",
    ],
)
def test_nodes_that_are_not_alike_make_a_heterogeneous_job(unlike: str) -> None:
    assert job_shape(load(*TWO_RANKS, *THREE_NODES, unlike)).heterogeneous


def test_a_plain_job_can_be_asked_for() -> None:
    wanted = (*TWO_RANKS, *THREE_NODES, "slurm.gangs.generate.gpus_per_worker=4", "slurm.job=plain")
    assert not job_shape(load(*wanted)).heterogeneous


def test_gangs_without_nodes_share_the_batch_node_which_comes_first() -> None:
    shape = job_shape(load(*TWO_RANKS, "slurm.gangs={generate: {nodes: 1}}"))
    assert [[step.gang for step in one.steps] for one in shape.groups] == [["score", "train"], ["generate"]]


def test_the_nodes_that_the_policy_is_on_come_first_also_where_they_are_another_gangs() -> None:
    gangs = "slurm.gangs={generate: {nodes: 1}, score: {nodes: 1}, train: {beside: score}}"
    assert [[step.gang for step in one.steps] for one in job_shape(load(gangs)).groups] == [
        ["score", "train"],
        ["generate"],
    ]


def test_replicas_with_ranks_have_a_gpu_and_threads_for_each() -> None:
    changes = ("engine.tensor_parallel=2", "placement.gangs.generate={workers: 4, threads: 3}")
    shape = job_shape(load(*changes, "slurm.gangs={generate: {nodes: 2}}"))
    engines = shape.groups[1]
    assert engines.steps == (Step("generate", False, 4, cpus=6, gpus=2),)
    assert (engines.nodes, engines.cpus, engines.gpus) == (2, 12, 4)


def test_a_critics_gang_is_not_asked_for_without_a_critic() -> None:
    """It is not started; another gang may still be placed beside it."""
    changes = (
        "placement.gangs={critic: {}}",
        "placement.roles.critic=critic",
        "slurm.gangs={train: {nodes: 1}, critic: {nodes: 1}, generate: {beside: critic}, score: {beside: train}}",
    )
    steps = [[step.gang for step in one.steps] for one in job_shape(load(*changes)).groups]
    assert steps == [["score", "train"], ["generate", "critic"]]
    without = load(*changes, "ppo.advantage=reinforce_pp", "ppo.kl.where=loss")
    steps = [[step.gang for step in one.steps] for one in job_shape(without).groups]
    assert steps == [["score", "train"], ["generate"]]


def test_without_gpus_none_is_asked_for() -> None:
    assert {one.gpus for one in job_shape(load(*THREE_NODES, *TWO_RANKS, "slurm.gres=null")).groups} == {0}


def test_gangs_that_share_devices_need_the_gpus_of_the_largest() -> None:
    shares = ("placement.device_sharing=[[generate,train]]", "placement.gangs.generate.workers=3", *TWO_RANKS)
    assert [one.gpus for one in job_shape(load(*shares)).groups] == [3]
    two_nodes = "slurm.gangs={train: {nodes: 2}, generate: {beside: train}}"
    shares = (shares[0], "placement.gangs.generate.workers=4", *TWO_RANKS, two_nodes)
    assert {group.steps[0].gang: group.gpus for group in job_shape(load(*shares)).groups} == {"generate": 2, "score": 0}


def test_a_step_is_given_all_gpus_of_its_nodes_and_binds_no_task_to_some() -> None:
    """A rank that does not see its peers' GPUs reaches them over PCIe instead of NVLink."""
    script = written("placement.gangs.generate.workers=2", *TWO_RANKS)
    lines = {line.split()[1]: line for line in script.splitlines() if line.startswith(("ranks ", "replicas "))}
    for gang in ("train", "generate"):
        assert lines[gang].split()[-1] == "--gres=gpu:4"
    assert lines["score"].split()[-1] == "--gres=none"
    assert not re.search("gpu-bind|gpus-per-task|tres-per-task|--exact", "".join(lines.values()))


def test_the_nodes_of_a_plain_job_are_alike_and_so_are_the_gpus_of_its_steps() -> None:
    script = written("engine.tensor_parallel=2", "slurm.gres=gpu:h100", *THREE_NODES, *TWO_RANKS, "slurm.job=plain")
    found = re.findall(r"^(?:ranks|replicas) (\w+) .* --gres=(.*)$", script, re.MULTILINE)
    assert dict(found) == {"train": "gpu:h100:2", "generate": "gpu:h100:2", "score": "none"}
    assert "--gres=gpu:h100:2" in next(line for line in script.splitlines() if "#SBATCH --nodes" in line)


def written(*changes: str) -> str:
    return render(load(*changes), ScriptValues("a run", "run", "/runs/run", Path("/"), Path("/output")))
