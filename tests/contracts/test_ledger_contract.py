"""What every ledger must do, whatever filesystem is under it: a commit is whole or not there, and only one wins."""

from __future__ import annotations

import json
import math
import signal
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from storage.address import Address, Ref
from storage.errors import StoreError
from storage.ledger import ArrayInfo, Commit, Input, Ledger, Provenance, decode, encode, new_attempt
from tests.support.processes import exit_status

PROVENANCE = Provenance(
    inputs=(Input(Address("publish", 11), "a0-00000001"),),
    weight_versions=(10, 11),
    seed=7,
    config_hash="c0ffee",
    worker="tcp://w",
    host="h",
    pid=42,
    started=1.5,
)


def commit_at(address: Address, attempt: str = "a0-12345678") -> Commit:
    return Commit(
        address=address,
        attempt=attempt,
        kind="scores",
        rows=4,
        arrays={"scores": ArrayInfo("float32", (4,), 0xDEADBEEF)},
        provenance=PROVENANCE,
        finished=2.5,
        metrics={"score": 0.1 + 0.2},
        state={"kl": {"coef": 0.05}},
        digest="ab12",
    )


class LedgerContract:
    """Subclasses say where the ledger is."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        raise NotImplementedError

    def test_nothing_is_found_where_nothing_was_committed(self, url: str) -> None:
        assert Ledger(url).find(Address("score", 12, 3)) is None
        assert Ledger(url).list() == []

    def test_a_commit_is_read_back_by_another_ledger_exactly(self, url: str) -> None:
        commit = commit_at(Address("score", 12, 3))
        assert Ledger(url).commit(commit) == commit
        assert Ledger(url).find(commit.address) == commit

    def test_the_file_has_its_place_and_is_strict_json(self, url: str) -> None:
        Ledger(url).commit(replace(commit_at(Address("score", 12, 3)), metrics={"a": math.nan, "b": -math.inf}))
        with fsspec.open(f"{url}/score/step_000012/shard_0003.json") as stream:
            document = json.load(stream, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
        assert document["format"] == 1
        assert document["metrics"] == {"a": "NaN", "b": "-Infinity"}
        found = Ledger(url).find(Address("score", 12, 3))
        assert found is not None
        assert math.isnan(found.metrics["a"])
        assert found.metrics["b"] == -math.inf

    def test_the_first_commit_wins_and_the_second_learns_who_did(self, url: str) -> None:
        first, second = (commit_at(Address("score", 0), f"a{n}-00000000") for n in range(2))
        assert Ledger(url).commit(first) == first
        assert Ledger(url).commit(second) == first
        assert Ledger(url).find(first.address) == first

    def test_list_is_ordered_and_by_stage(self, url: str) -> None:
        ledger = Ledger(url)
        addresses = [
            Address("score", 2, 1),
            Address("generate", 10, 0),
            Address("score", 2, 0),
            Address("generate", 9, 0),
        ]
        for address in addresses:
            ledger.commit(commit_at(address))
        assert [c.address for c in ledger.list()] == sorted(addresses)
        assert [c.address for c in ledger.list("score")] == [Address("score", 2, 0), Address("score", 2, 1)]

    def test_a_torn_record_is_an_error_that_names_it(self, url: str) -> None:
        with fsspec.open(f"{url}/score/step_000000/shard_0000.json", "wb", auto_mkdir=True) as stream:
            stream.write(encode(commit_at(Address("score", 0)))[:100])
        with pytest.raises(StoreError, match="score/step_000000/shard_0000"):
            Ledger(url).find(Address("score", 0))


class TestLocalLedger(LedgerContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "ledger")

    @pytest.mark.processes
    def test_a_process_killed_before_the_last_call_leaves_no_commit(self, url: str) -> None:
        """The commit's name appears in one system call: just before it there is nothing, not half a record."""
        script = f"""
import os, signal
from storage import files
from storage.ledger import Ledger, decode
files.os.link = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
Ledger({url!r}).commit(decode({encode(commit_at(Address("score", 0)))!r}))
"""
        assert exit_status(script) == -signal.SIGKILL
        assert list(Path(url, "score/step_000000").iterdir()), "it died before it wrote anything: the test is void"
        assert Ledger(url).find(Address("score", 0)) is None
        assert Ledger(url).list() == []
        later = commit_at(Address("score", 0), "a1-00000000")
        assert Ledger(url).commit(later) == later


class TestMemoryLedger(LedgerContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"memory://{uuid.uuid4().hex}/ledger"


def test_a_ref_carries_what_the_driver_needs() -> None:
    commit = commit_at(Address("score", 12, 3))
    assert commit.ref() == Ref(commit.address, commit.attempt, {"score": 0.1 + 0.2}, {"kl": {"coef": 0.05}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"surprise": 1}, r"unknown \['surprise'\]"),
        ({"address": {"stage": "score", "step": 0}}, r"missing \['shard'\]"),
    ],
)
def test_other_formats_and_fields_are_refused(change: dict[str, object], message: str) -> None:
    document = json.loads(encode(commit_at(Address("score", 0)))) | change
    with pytest.raises(StoreError, match=message):
        decode(json.dumps(document).encode())


def test_a_missing_field_is_refused() -> None:
    document = json.loads(encode(commit_at(Address("score", 0))))
    del document["digest"]
    with pytest.raises(StoreError, match=r"missing \['digest'\]"):
        decode(json.dumps(document).encode())


def test_a_state_that_is_not_finite_is_refused() -> None:
    """The next step computes with it; a metric may be NaN, a controller's state may not."""
    with pytest.raises(ValueError, match="score/step_000000/shard_0000"):
        encode(replace(commit_at(Address("score", 0)), state={"coef": math.nan}))


def test_attempts_have_names_of_their_own() -> None:
    names = {new_attempt(3) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("a3-") and len(name) == 11 for name in names)
