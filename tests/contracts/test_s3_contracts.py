"""The contracts of ledger and rollout store on S3, and the faults of its server: moto's server, over HTTP, by s3fs.

What they rest on there is the conditional PUT (If-None-Match), which moto has since its pull request 8109 of 2024.
`tests/integration/test_run_on_object_store.py` has whole runs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    away = s3fs.S3FileSystem(endpoint_url="http://127.0.0.1:9", skip_instance_cache=True)  # nobody listens there
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
    """`recover` names it and goes on with the others."""
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
