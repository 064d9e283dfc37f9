"""Workers that may join an attached run: requests over stand-ins of connections, from made-up hosts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.loading import load_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.attached_workers import GIB, WorkerRegistry, host_problems
from pipeline.workers.attached import JoinRequest, describe_host, local_versions
from pipeline.workers.scheduler_file import SchedulerFile
from tests.support.configs import arguments, write_config

GANGS = "placement={gangs: {generate: {workers: 2}, train: {workers: 2}}, roles: {generate: generate, score: generate, "
GANGS += "reference: train, policy: train, critic: train}}"
BOARD_BYTES = GIB


class Link:
    """A connection whose other end is the test."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.hung_up = asyncio.Event()

    async def write(self, message: dict[str, Any]) -> None:
        if self.hung_up.is_set():
            raise OSError("closed")
        self.answers.put_nowait(message)

    async def read(self) -> object:
        await self.hung_up.wait()
        raise OSError("closed")

    def abort(self) -> None:
        self.hung_up.set()


class Setting:
    """Owns a run's directory and its roster."""

    def __init__(self, folder: Path, *changes: str) -> None:
        write_config(folder)
        text = (folder / "c.yaml").read_text()
        (folder / "c.yaml").write_text(text[: text.index("placement:")])
        file, *rest = arguments(folder)
        self.config: RunConfig = load_config([file], [*rest, GANGS, "cluster.kind=attached", *changes])
        attached = RunPaths(self.config.run_dir).attached
        attached.mkdir(parents=True)
        self.file = SchedulerFile(
            driver=1,
            address="tls://127.0.0.1:1",
            host="driver",
            process=1,
            run_dir=str(self.config.run_dir),
            working_dir=str(folder),
            nonce="said",
            certificate="",
            key="",
            config=to_yaml(self.config),
        )
        self.file.shared.write_text("said")
        self.reported: list[dict[str, Any]] = []
        self.registry = WorkerRegistry(self.config, self.file, BOARD_BYTES, self.reported.append)

    def request(self, gang: str, index: int, **changes: Any) -> JoinRequest:
        found = describe_host(self.file, gang, index, Path("/"))
        given = {"gpus": [], "host": "n1", "board_free": BOARD_BYTES, **changes}
        return dataclasses.replace(found, **given)

    @asynccontextmanager
    async def joining(self, gang: str, index: int, **changes: Any) -> AsyncIterator[tuple[Link, dict[str, Any]]]:
        """A worker that asks, what it is answered, and, while the body runs, its connection."""
        link = Link()
        message = dataclasses.asdict(self.request(gang, index, **changes))
        serving = asyncio.create_task(self.registry.serve(link, message))
        try:
            yield link, await asyncio.wait_for(link.answers.get(), 10)
        finally:
            link.abort()
            await serving


async def in_turn(setting: Setting) -> None:
    async with setting.joining("train", 0) as (_, first):
        assert first == {"devices": []}
        async with setting.joining("train", 0, host="n2") as (_, second):
            assert second["refused"].startswith("host n2: train-0 is there already: process")
            assert second["refused"].endswith("on host n1")
    async with setting.joining("train", 0, host="n2") as (_, third):
        assert third == {"devices": []}
    assert [refusal["fatal"] for refusal in setting.reported] == [False]


def test_one_worker_of_each_index_and_the_next_when_it_is_gone(tmp_path: Path) -> None:
    asyncio.run(in_turn(Setting(tmp_path)))


@pytest.mark.parametrize(
    ("gang", "index", "said"),
    [("trian", 0, "the run has no gang 'trian'; it has generate, train"), ("train", 2, "no index 2; it has 0 to 1")],
)
def test_a_worker_that_the_run_does_not_have_is_no_matter(tmp_path: Path, gang: str, index: int, said: str) -> None:
    async def work(setting: Setting) -> None:
        async with setting.joining(gang, index) as (_, answer):
            assert answer["refused"].startswith("host n1: ")
            assert said in answer["refused"]

    setting = Setting(tmp_path)
    asyncio.run(work(setting))
    assert [(one["gang"], one["fatal"]) for one in setting.reported] == [(gang, False)]


def other(**versions: str) -> dict[str, str]:
    return local_versions() | versions


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared": "it is another directory"}, "it is another directory"),
        ({"clock": 60.0}, "its clock is 40.0 s behind the driver's, more than 5 s"),
        ({"clock": 160.0}, "its clock is 60.0 s ahead of the driver's"),
        ({"versions": other(dask="1.0")}, "other versions than the driver: dask 1.0 (the driver: "),
        ({"versions": {}}, "python None (the driver: "),
        ({"board_free": GIB // 2}, "will take 1.00 GiB (staleness + 2 versions) and its shared memory has 0.50"),
    ],
)
def test_a_host_that_is_not_fit(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    setting = Setting(tmp_path)
    request = setting.request("train", 0, **{"clock": 100.0, **changes})
    found = [*host_problems(request, setting.config, 100.0, local_versions(), BOARD_BYTES)]
    assert len(found) == 1
    assert said in found[0]
    assert not [*host_problems(setting.request("train", 0, clock=96.0), setting.config, 100.0, local_versions(), 0)]


@pytest.mark.parametrize("slow", ["gpu_identities", "_directory_fault", "_free_bytes"])
def test_a_hosts_clock_is_read_after_the_slow_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """Asking for GPUs loads torch, and the run's directory may be far away: neither is the clock's fault."""
    setting, now, answer = (
        Setting(tmp_path),
        [100.0],
        {"gpu_identities": [], "_directory_fault": "", "_free_bytes": GIB},
    )

    def take_long(*_: object) -> object:
        now[0] += 60
        return answer[slow]

    monkeypatch.setattr("pipeline.workers.attached.time.time", lambda: now[0])
    monkeypatch.setattr(f"pipeline.workers.attached.{slow}", take_long)
    request = setting.request("train", 0)
    assert [*host_problems(request, setting.config, now[0], local_versions(), 0)] == []


def test_a_host_that_is_not_fit_is_refused_by_name_and_the_executor_hears_of_it(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        async with setting.joining("generate", 1, host="n7", board_free=0) as (_, answer):
            assert answer["refused"].startswith("host n7: published weights will take")

    setting = Setting(tmp_path)
    asyncio.run(work(setting))
    (refusal,) = setting.reported
    assert (refusal["gang"], refusal["index"], refusal["fatal"]) == ("generate", 1, True)


@pytest.mark.parametrize(
    ("index", "versions", "said", "fatal"),
    [
        (
            0,
            {"stageline": "0.0.1"},
            "host n7: it has other versions than the driver: stageline 0.0.1 (the driver: ",
            True,
        ),
        (0, {}, "host n7: its request is none of this version of Stageline: board_free: Field required", True),
        (2, {"stageline": "0.0.1"}, "host n7: gang train has no index 2", False),
    ],
)
def test_a_worker_of_another_version(
    tmp_path: Path, index: int, versions: dict[str, str], said: str, fatal: bool
) -> None:
    async def work(setting: Setting) -> None:
        link, message = Link(), dataclasses.asdict(setting.request("train", 0, host="n7"))
        message |= {"index": index, "versions": other(**versions)}
        del message["board_free"]
        await setting.registry.serve(link, message)
        assert said in link.answers.get_nowait()["refused"]

    setting = Setting(tmp_path)
    asyncio.run(work(setting))
    assert [(one["gang"], one["index"], one["fatal"]) for one in setting.reported] == [("train", index, fatal)]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_text("other"), "is not what the driver wrote"),
        (lambda path: path.unlink(), "is not what the driver wrote"),
    ],
)
def test_a_directory_that_is_not_the_drivers_is_seen(tmp_path: Path, harm: Callable[[Path], object], said: str) -> None:
    setting = Setting(tmp_path)
    assert setting.request("train", 0).shared == ""
    harm(setting.file.shared)
    assert said in setting.request("train", 0).shared


def test_what_a_host_wrote_must_be_seen_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(setting: Setting) -> None:
        async with setting.joining("train", 0, wrote="from-nowhere") as (_, answer):
            assert "was not seen by the driver's host" in answer["refused"]

    monkeypatch.setattr("pipeline.driver.attached_workers._SEEN_WITHIN_S", 0.0)
    asyncio.run(work(Setting(tmp_path)))


def test_what_a_host_wrote_is_removed(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        async with setting.joining("train", 0) as (_, answer):
            assert answer == {"devices": []}

    setting = Setting(tmp_path)
    asyncio.run(work(setting))
    assert [path.name for path in setting.file.shared.parent.iterdir()] == ["shared-000001"]


def test_workers_that_see_the_same_gpus_do_not_meet_on_one(tmp_path: Path) -> None:
    """Two of one host, which see both of its GPUs; one of another host, whose only GPU is another one; and one that
    sees what is taken."""

    async def work(setting: Setting) -> None:
        async with (
            setting.joining("train", 0, gpus=["a", "b"]) as (_, first),
            setting.joining("generate", 0, gpus=["a", "b"]) as (_, second),
            setting.joining("train", 1, gpus=["c"], host="n2") as (_, third),
            setting.joining("generate", 1, gpus=["c"], host="n2") as (_, fourth),
        ):
            assert [one["devices"] for one in (first, second, third)] == [[0], [1], [0]]
            assert "needs 1 GPUs; of the 1 that it sees 0 are free, others are train-1's" in fourth["refused"]
        async with setting.joining("train", 0, gpus=["a"]), setting.joining("train", 1, host="n2") as (_, without):
            assert without["refused"] == "host n2: it sees no GPU, unlike train-0 on host n1"

    asyncio.run(work(Setting(tmp_path)))


def test_gpus_are_shared_where_the_config_says_so(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        async with (
            setting.joining("train", 0, gpus=["a"]),
            setting.joining("generate", 0, gpus=["a"]) as (_, shares),
            setting.joining("train", 1, gpus=["a"]) as (_, rank),
        ):
            assert shares == {"devices": [0]}
            assert "refused" in rank, "two ranks of a gang are never on one GPU"

    asyncio.run(work(Setting(tmp_path, "placement.oversubscribe=true")))


def test_every_worker_is_told_the_end(tmp_path: Path) -> None:
    async def work(setting: Setting) -> None:
        async with setting.joining("train", 0) as (one, _), setting.joining("train", 1) as (two, _):
            await setting.registry.end("the run has ended")
            for link in (one, two):
                assert await asyncio.wait_for(link.answers.get(), 10) == {"over": "the run has ended"}

    asyncio.run(work(Setting(tmp_path)))
