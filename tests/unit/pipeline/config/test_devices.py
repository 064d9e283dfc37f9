"""Workers and GPUs, with faked numbers of them: nothing here has a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipeline.config.devices import (
    THIS_HOST,
    device_problems,
    devices_of_joining_worker,
    place_all_here,
    plan_devices,
    visible_devices,
)
from pipeline.graph.graph import Gang
from pipeline.workers.worker_process import worker_environment
from stages.models.protocol import Role
from storage.problems import Problem

TRAINED = frozenset({Role.POLICY, Role.REFERENCE})


def gangs(train: int = 2, critic: int = 0, generate: int = 1, *, ranks: int = 1, scorers: int = 0) -> list[Gang]:
    """`ranks`: of one engine. `scorers`: GPUs of a scoring worker."""
    found = [
        Gang("critic", frozenset({Role.CRITIC}), critic, gpus=1),
        Gang("generate", frozenset({Role.GENERATE}), generate, gpus=ranks),
        Gang("score", frozenset({Role.SCORE}), 3, gpus=scorers),
        Gang("train", TRAINED, train, gpus=1),
    ]
    return [gang for gang in found if gang.workers]


def planned(placed: list[Gang], gpus: int) -> dict[str, list[tuple[int, ...]]]:
    """The GPUs of each gang's workers, in order."""
    assert not problems(placed, gpus, share=True)
    plan = plan_devices(placed, place_all_here(placed), {THIS_HOST: gpus})
    return {gang.name: [plan[gang.name, index] for index in range(gang.workers)] for gang in placed}


def problems(placed: list[Gang], gpus: int, *, share: bool = False) -> list[Problem]:
    return [*device_problems(placed, place_all_here(placed), {THIS_HOST: gpus}, share=share)]


def used(plan: Mapping[str, list[tuple[int, ...]]]) -> list[int]:
    return sorted(gpu for of_gang in plan.values() for gpus in of_gang for gpu in gpus)


def test_every_rank_and_every_replica_has_a_gpu_of_its_own() -> None:
    """Two replicas of one rank each used to share GPU 0, with rank 0 of the trainer and of the critic."""
    plan = planned(gangs(train=2, critic=2, generate=2), 6)
    assert plan == {"critic": [(0,), (1,)], "train": [(2,), (3,)], "generate": [(4,), (5,)], "score": [()] * 3}
    assert not problems(gangs(train=2, critic=2, generate=2), 6)


def test_a_replica_of_several_ranks_has_that_many() -> None:
    plan = planned(gangs(train=1, generate=2, ranks=2), 5)
    assert plan == {"generate": [(0, 1), (2, 3)], "train": [(4,)], "score": [()] * 3}


def test_scoring_workers_with_models_have_gpus_too() -> None:
    plan = planned(gangs(train=1, generate=1, scorers=1), 5)
    assert plan == {"generate": [(0,)], "score": [(1,), (2,), (3,)], "train": [(4,)]}
    (problem,) = problems(gangs(train=1, generate=1, scorers=1), 4)
    assert "need 5 GPUs (generate 1, score 3, train 1)" in problem.need


def test_one_process_for_everything_has_what_its_engine_needs() -> None:
    everything = [Gang("all", frozenset(Role), 1, gpus=2)]
    assert planned(everything, 3) == {"all": [(0, 1)]}


def test_gangs_that_take_turns_have_the_same_gpus() -> None:
    placed, device_sharing = gangs(train=4, critic=1, generate=2, ranks=2), [["generate", "train"]]
    here, count = place_all_here(placed), {THIS_HOST: 5}
    assert not [*device_problems(placed, here, count, share=False, device_sharing=device_sharing)]
    plan = plan_devices(placed, here, count, device_sharing)
    assert [plan["train", rank] for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [plan["generate", replica] for replica in range(2)] == [(0, 1), (2, 3)]
    assert plan["critic", 0] == (4,), "which takes no turns"
    (problem,) = device_problems(placed, here, {THIS_HOST: 4}, share=False, device_sharing=device_sharing)
    assert "need 5 GPUs" in problem.need


def test_a_worker_that_joins_may_have_what_another_has_in_turn() -> None:
    (engine,) = (gang for gang in gangs(train=1, generate=1) if gang.name == "generate")
    taken = {"gpu-a": [("train", 0)], "gpu-b": [("critic", 0)]}
    seen = ["gpu-b", "gpu-a"]
    device_sharing = [["generate", "train"]]
    assert devices_of_joining_worker(engine, seen, taken, share=False, device_sharing=device_sharing) == (1,)
    assert "of the 2 that it sees 0 are free" in str(devices_of_joining_worker(engine, seen, taken, share=False))


def test_a_host_without_gpus_gives_none() -> None:
    assert used(planned(gangs(train=4, generate=2), 0)) == []
    assert not problems(gangs(train=4, generate=2), 0)


def test_too_few_gpus_are_refused_unless_sharing_is_asked_for() -> None:
    placed = gangs(train=4, generate=2)
    (problem,) = problems(placed, 4)
    assert (problem.key, problem.given) == ("placement.gangs.train.workers", 4)
    assert "need 6 GPUs (generate 2, train 4), this host has 4" in problem.need
    assert "placement.oversubscribe=true" in problem.need
    assert planned(placed, 4) == {"train": [(0,), (1,), (2,), (3,)], "generate": [(0,), (1,)], "score": [()] * 3}


def test_gangs_share_all_their_gpus_or_none() -> None:
    plan = planned(gangs(train=2, critic=2, generate=3), 3)
    assert (plan["critic"], plan["train"]) == ([(0,), (1,)], [(0,), (1,)])
    assert plan["generate"] == [(2,), (2,), (0,)]  # the least used, one after the other
    (problem,) = problems(gangs(train=3, critic=2, generate=1), 4, share=True)
    assert (problem.key, problem.given) == ("placement.gangs.critic.workers", 2)
    assert "some of another gang's GPUs and not all" in problem.need


def test_the_ranks_of_a_gang_never_share() -> None:
    (problem,) = problems(gangs(train=4), 2, share=True)
    assert (problem.key, problem.given) == ("placement.gangs.train.workers", 4)
    assert "its ranks need 4 GPUs, this host has 2: at most 2" in problem.need
    assert "the gangs need" not in problem.need
    (problem,) = problems(gangs(train=4, generate=2), 2)
    assert "the gangs need 6 GPUs" in problem.need, "so that nobody asks for 4 next"
    (problem,) = problems(gangs(train=1, ranks=4), 2, share=True)
    assert problem.key == "engine.tensor_parallel"


def test_gpus_are_counted_on_each_host_by_itself() -> None:
    placed = gangs(train=4, generate=2)
    hosts = place_all_here(placed) | {("train", 2): "b", ("train", 3): "b", ("generate", 1): "b"}
    count = {THIS_HOST: 3, "b": 4}
    assert not [*device_problems(placed, hosts, count, share=False)]
    plan = plan_devices(placed, hosts, count)
    assert [plan["train", index] for index in range(4)] == [(0,), (1,), (0,), (1,)]
    assert [plan["generate", index] for index in range(2)] == [(2,), (2,)]
    (problem,) = device_problems(placed, hosts, {THIS_HOST: 3, "b": 2}, share=False)
    assert "b has 2" in problem.need


@pytest.mark.parametrize(
    ("indices", "inherited", "expected"),
    [((0, 2), None, "0,2"), ((1,), "4, 5,6", "5"), ((), "0,1", ""), ((1,), "GPU-a,GPU-b", "GPU-b")],
)
def test_a_worker_sees_its_own_gpus_alone(
    indices: tuple[int, ...], inherited: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The indices count the GPUs that a batch system has given to this process."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(indices, inherited) == expected
    assert worker_environment(1, True, expected)["CUDA_VISIBLE_DEVICES"] == expected
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(1, True)
