"""The contracts of ledger and rollout store on S3, and the faults of its server: moto's server, over HTTP, by s3fs.

What they rest on there is the conditional PUT (If-None-Match), which moto has since its pull request 8109 of 2024.
`tests/integration/test_run_on_object_store.py` has whole runs.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.config.stored import RunStorage, check_stored, claim
from pipeline.errors import ConfigError
from storage import files
from storage.address import Address
from storage.commits import new_attempt
from storage.config import Durability
from storage.errors import StoreError, StoreRefused, StoreUnavailable
from storage.ledger import Ledger
from storage.rollouts import RolloutStore
from storage.shards import group_metadata
from tests.contracts.test_ledger_contract import LedgerContract, commit_at
from tests.contracts.test_rollout_store_contract import LAYOUTS, PROVENANCE, StoreContract, assert_same, rollout
from tests.support.s3_server import Faults, s3fs

pytest_plugins = ("tests.support.s3_server",)  # the fixtures `bucket` and `faults`


class TestS3Ledger(LedgerContract):
    @pytest.fixture
    def url(self, bucket: str, tmp_path: Path) -> str:
        return f"{bucket}/{uuid.uuid4().hex}/ledger"

    def test_of_racing_threads_one_wins(self, url: str) -> None:
        for step in range(5):
            attempts = [replace(commit_at(Address("score", step)), attempt=new_attempt(i)) for i in range(8)]
            with ThreadPoolExecutor(8) as threads:
                winners = list(threads.map(Ledger(url).commit, attempts))
            assert len({winner.attempt for winner in winners}) == 1
            assert Ledger(url).find(Address("score", step)) == winners[0]


@pytest.mark.full  # `make test` has it on local directories
class TestS3Store(StoreContract):
    @pytest.fixture
    def url(self, bucket: str, tmp_path: Path) -> str:
        return f"{bucket}/{uuid.uuid4().hex}/run"


Work = Callable[[files.Root], object]


def moved(root: files.Root) -> list[object]:
    files.move(root, "a/1", "b/1")
    return [files.read(root, "a/1"), files.read(root, "b/1")]


def removed(root: files.Root) -> list[str]:
    files.remove(root, "a/1")
    return list(files.keys(root))


def removed_all(root: files.Root) -> list[str]:
    files.remove_tree(root, "a")
    return list(files.keys(root))


def written(root: files.Root) -> list[object]:
    files.write(root, "c", b"3")
    files.write_together(root, "d", {"1": b"4", "2": b"5"})
    return [files.read(root, key) for key in ("c", "d/1", "d/2")]


def created(root: files.Root) -> list[object]:
    files.write_new(root, "e", b"6")
    return [files.write_new(root, "e", b"7"), files.read(root, "e")]


OPERATIONS: dict[str, tuple[str, Work, object]] = {
    "read": ("GET", lambda root: files.read(root, "a/1"), b"1"),
    "keys": ("GET", lambda root: list(files.keys(root)), ["a/1", "a/2"]),
    "names": ("GET", lambda root: files.names(root.below("a")), ["1", "2"]),
    "write": ("PUT", written, [b"3", b"4", b"5"]),
    "write_new": ("PUT", created, [False, b"6"]),
    "move": ("PUT", moved, [None, b"1"]),
    "remove": ("DELETE", removed, ["a/2"]),
    "remove_tree": ("POST", removed_all, []),
}
"""name -> (its request, its work on a root with a/1 and a/2, what that finds)"""


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, and the answer lost"])
@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_servers_errors_are_waited_out(
    bucket: str, faults: Faults, operation: str, status: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, work, expected = OPERATIONS[operation]
    monkeypatch.setattr("storage.files.time.sleep", lambda pause_s: None)
    root = files.open_root(f"{bucket}/{uuid.uuid4().hex}")
    files.write_together(root, "a", {"1": b"1", "2": b"2"})
    faults.fail(method, status, after=after)
    assert work(root) == expected
    assert not faults.left, "the operation made no such request"


def test_a_server_that_stays_away_is_named(bucket: str, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.files.time.sleep", lambda pause_s: None)
    root = files.open_root(f"{bucket}/{uuid.uuid4().hex}", Durability(retry_s=0))
    faults.fail("PUT", 503)
    with pytest.raises(StoreUnavailable):
        files.write(root, "a", b"1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        for port in (9, silent.getsockname()[1]):  # nobody listens at 9
            away = s3fs.S3FileSystem(
                endpoint_url=f"http://127.0.0.1:{port}",
                config_kwargs={"read_timeout": 0.1, "retries": {"max_attempts": 0}},
                session=files._s3_session(),
                skip_instance_cache=True,
            )
            with pytest.raises(StoreUnavailable):
                files.write(files.Root(away, "runs/x", Durability(retry_s=0)), "a", b"1")


def test_a_server_that_does_not_name_the_condition_refuses_a_second_file_too(bucket: str, faults: Faults) -> None:
    root = files.open_root(f"{bucket}/{uuid.uuid4().hex}")
    faults.fail("PUT", 412)
    assert not files.write_new(root, "a", b"1")


def test_a_bucket_must_exist(bucket: str) -> None:
    root = files.open_root("s3://no-such-bucket/run")
    with pytest.raises(StoreRefused):
        files.write(root, "a", b"1")
    with pytest.raises(StoreRefused):
        files.write_new(root, "a", b"1")
    assert root.fs.ls("") == ["runs"]


def test_another_process_writes_are_seen(bucket: str) -> None:
    """The client keeps no listing: a second client stands for another process."""
    url = f"{bucket}/{uuid.uuid4().hex}"
    root = files.open_root(url)
    files.write(root, "a/1", b"1")
    assert (files.names(root), files.names(root.below("a"))) == (["a"], ["1"])
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    other.pipe_file(f"{root.path}/a/2", b"2")
    assert (list(files.keys(root)), files.names(root.below("a"))) == (["a/1", "a/2"], ["1", "2"])
    assert files.read(root, "a/2") == b"2"
    other.rm_file(f"{root.path}/a/1")
    assert files.read(root, "a/1") is None


def test_a_damaged_attempt_is_left_to_its_readers(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`recover` names it and continues with the others. It removes it if the arrays are at their chunk keys already."""
    url, damaged, sound = f"{bucket}/{uuid.uuid4().hex}", Address("generate", 0), Address("generate", 1)
    ledger, run = Ledger(f"{url}/ledger"), files.open_root(url)
    store = RolloutStore(url, ledger, LAYOUTS)
    for address in (damaged, sound):
        ledger.commit(store.prepare(address, rollout(), PROVENANCE, attempt="a0-11111111"))
    key = "attempts/generate-000000-0000-a0-11111111.packed"
    data = bytearray(files.read(run, key) or b"")
    data[-1] ^= 1
    files.write(run, key, bytes(data))
    assert store.recover() == 1
    assert key in capsys.readouterr().err
    assert_same(store.read(sound), rollout())
    with pytest.raises(StoreError, match="generate-000000"):
        store.read(damaged)
    settled = store.write(Address("generate", 0, 2), rollout(), PROVENANCE)
    files.write(run, f"attempts/generate-000000-0002-{settled.attempt}.packed", bytes(data))
    assert store.recover() == 0
    assert [*files.keys(run.below("attempts"))] == [key.removeprefix("attempts/")]


def test_records_are_read_ahead_into_the_cache(bucket: str, faults: Faults) -> None:
    """Reading one later makes no request. A record that is not there is left to the read."""
    url, address, record = f"{bucket}/{uuid.uuid4().hex}", Address("generate", 0), rollout()
    RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).write(address, record, PROVENANCE)
    store = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS, recent_bytes=1 << 20)
    store.prefetch([address, Address("generate", 1)])
    faults.fail("GET", 503)
    assert_same(store.read(address), record)
    assert faults.left == [("GET", 503, False)]
    faults.left = []


def requests(faults: Faults, act: Callable[[], object]) -> list[tuple[str, str]]:
    """Return (method, kind of object) for the requests that `act` makes, sorted."""
    before = len(faults.seen)
    act()
    kinds = {".json": "record", ".packed": "attempt", ".segment": "segment"}
    seen = [(method, path.rsplit("/", 1)[-1]) for method, path in faults.seen[before:]]
    return sorted((method, next((kinds[k] for k in kinds if name.endswith(k)), "chunk")) for method, name in seen)


def test_a_workers_record_is_read_with_one_request_until_it_is_some_steps_old(bucket: str, faults: Faults) -> None:
    """Then its attempt's object is removed, together with the others of its step, and its files are at their chunk
    keys."""
    url = f"{bucket}/{uuid.uuid4().hex}"

    def attempts() -> list[int]:
        return [address.step for address, _ in RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).attempts()]

    def read_ahead(step: int) -> list[tuple[str, str]]:
        store = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS, recent_bytes=1 << 20)
        made = requests(faults, lambda: store.prefetch([Address("generate", step)]))
        assert_same(store.read(Address("generate", step)), rollout(step))
        return made

    def write(step: int) -> None:
        worker._writeback = files.Writeback()  # closed here, so that all is done when the requests are counted
        for shard in range(2):
            worker.write(Address("generate", step, shard), rollout(step), PROVENANCE)
        worker._writeback.close()

    worker = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS)
    for step in range(4):
        removals = [method for method, _ in requests(faults, partial(write, step)) if method == "POST"]
        assert len(removals) == (step == 3)
        assert read_ahead(step) == [("GET", "attempt"), ("GET", "record")]
    assert attempts() == [1, 1, 2, 2, 3, 3]
    others = len(rollout().arrays())
    assert read_ahead(0) == [("GET", "attempt"), *[("GET", "chunk")] * others, ("GET", "record")]


def test_objects_that_a_dead_worker_kept_are_removed_and_their_records_stay(bucket: str) -> None:
    url, writeback = f"{bucket}/{uuid.uuid4().hex}", files.Writeback()
    worker = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS, writeback=writeback)
    commit = worker.write(Address("generate", 0), rollout(), PROVENANCE)
    writeback.close()
    driver = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS)
    assert driver.recover() == 1
    assert driver.attempts() == []
    assert_same(driver.read(commit.address), rollout())
    assert list(driver.plain_faults(commit)) == []


def test_arrays_are_described_without_a_look_and_groups_keep_their_attributes(bucket: str, faults: Faults) -> None:
    url, address = f"{bucket}/{uuid.uuid4().hex}", Address("generate", 0)
    run = files.open_root(url)
    group = group_metadata({"by": "a user"})
    files.write(run, "rollouts.zarr/step_000000/zarr.json", group)
    before = len(faults.seen)
    RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).write(address, rollout(), PROVENANCE)
    looked_at = {
        path.split("rollouts.zarr/")[1]
        for method, path in faults.seen[before:]
        if path.endswith("zarr.json") and method == "GET"
    }
    assert looked_at == {"zarr.json", "step_000000/zarr.json"}
    assert files.read(run, "rollouts.zarr/step_000000/zarr.json") == group


def test_a_closed_segment_is_looked_for_once_and_not_for_each_record(bucket: str, faults: Faults) -> None:
    ledger = Ledger(f"{bucket}/{uuid.uuid4().hex}/ledger")
    for shard in range(5):
        ledger.commit(commit_at(Address("score", 0, shard)))
    assert requests(faults, ledger.remove_closed_records).count(("GET", "segment")) == 1
    assert len(ledger.open_addresses()) == 5


def test_the_files_of_a_record_are_written_and_read_with_requests_at_the_same_time(bucket: str, faults: Faults) -> None:
    """Each takes a round trip, and a record has a file for each array."""
    url, address, record = f"{bucket}/{uuid.uuid4().hex}", Address("generate", 0), rollout()
    faults.expect_two("PUT")
    RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).write(address, record, PROVENANCE)
    assert faults.lonely == 0
    faults.expect_two("GET")
    assert_same(RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).read(address), record)
    assert faults.lonely == 0
    faults.expect_two("")


def stored(url: str, directory: Path) -> RunStorage:
    return RunStorage(directory, f"{url}/{uuid.uuid4().hex}")


def test_a_new_run_wants_a_place_of_its_own_and_a_resumed_one_its_data(bucket: str, tmp_path: Path) -> None:
    place = stored(bucket, tmp_path)
    check_stored(place, resume=False, had_url=False)
    assert list(files.keys(place.root)) == [], "the probe is removed"
    with pytest.raises(ConfigError, match=r"^storage.url: given 's3://.*there is no data of this run"):
        check_stored(place, resume=True, had_url=True)
    claim(place)
    check_stored(place, resume=True, had_url=True)
    with pytest.raises(ConfigError, match=r"^storage.url: given 's3://.*holds a run already"):
        check_stored(place, resume=False, had_url=False)


def test_of_two_directories_drivers_the_later_one_has_the_run(bucket: str, tmp_path: Path) -> None:
    place = stored(bucket, tmp_path / "first")
    first = claim(place)
    assert first.later() is None
    second = claim(replace(place, directory=tmp_path / "second"))
    assert str(tmp_path / "second") in str(first.later())
    assert second.later() is None


def test_a_bucket_that_cannot_be_used_is_refused_with_the_key(
    bucket: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = stored(bucket, tmp_path)
    with pytest.raises(ConfigError, match=r"^storage.url: given 's3://no-such-bucket/run'; cannot be used"):
        check_stored(RunStorage(tmp_path, "s3://no-such-bucket/run"), resume=False, had_url=False)
    monkeypatch.setattr(faults, "read_only", True)
    with pytest.raises(ConfigError, match=r"^storage.url: .*cannot be used"):
        check_stored(place, resume=False, had_url=False)
    monkeypatch.setattr(faults, "read_only", False)
    monkeypatch.setattr(faults, "unconditional", True)
    with pytest.raises(ConfigError, match=r"^storage.url: .*If-None-Match"):
        check_stored(place, resume=False, had_url=False)


def test_a_run_whose_data_was_elsewhere_does_not_begin_anew_in_its_directory(tmp_path: Path) -> None:
    check_stored(RunStorage(tmp_path), resume=True, had_url=False)
    with pytest.raises(ConfigError, match=r"^storage.url: given null"):
        check_stored(RunStorage(tmp_path), resume=True, had_url=True)
