"""The contract of every ledger on any filesystem: a commit is complete or absent, and only one attempt wins."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import signal
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from storage import files
from storage.address import Address, Ref
from storage.commits import ArrayInfo, Commit, Input, Provenance, decode, encode, new_attempt, provenance_here
from storage.config import Durability
from storage.errors import DamagedCommit, MissingOutput, StoreError
from storage.ledger import SPAN, Ledger, segment_key
from tests.support.processes import exit_status

PROVENANCE = Provenance(
    inputs=(Input(Address("publish", 11), "a0-00000001", "c0ffee"),),
    weight_versions=(10, 11),
    seed=7,
    config_hash="c0ffee",
    worker="tcp://w",
    host="h",
    pid=42,
    started=1.5,
    numerics="beef01",
)


GOLDEN = rb"""{
 "format": 2,
 "address": {
  "stage": "score",
  "step": 1,
  "shard": 0
 },
 "attempt": "a0-4db741a0-0-8285",
 "kind": "scores",
 "rows": 8,
 "arrays": {
  "scores": {
   "dtype": "float32",
   "shape": [
    8
   ],
   "crc32": 1990185432
  },
  "scores.characters": {
   "dtype": "float32",
   "shape": [
    8
   ],
   "crc32": 1990185432
  }
 },
 "provenance": {
  "inputs": [
   {
    "address": {
     "stage": "generate",
     "step": 1,
     "shard": 0
    },
    "attempt": "a0-4db741a0-0-8916",
    "content": "bb70df9f6eb1349910e6879b3b821ed4"
   }
  ],
  "weight_versions": [],
  "seed": 0,
  "config_hash": "e345337b7a557b7c",
  "worker": "score-0",
  "host": "vm",
  "pid": 8204,
  "started": 1795557927.4729433,
  "numerics": "8b83d28b6270"
 },
 "finished": 1795557927.5035284,
 "metrics": {
  "score/mean": 0.015625,
  "score/best": "-Infinity",
  "score/gr\u00f6\u00dfe": 1e-07
 },
 "state": {},
 "digest": null,
 "checksum": "2f2ff87a36007eb47be281abc10f4ea2"
}
"""
"""A record as a run wrote it."""


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

    def test_closed_steps_are_found_as_before(self, url: str) -> None:
        """By every ledger, also one that was open before; and their files are gone."""
        other, ledger = Ledger(url), Ledger(url)
        commits = [
            ledger.commit(commit_at(Address(stage, step))) for step in range(SPAN) for stage in ("score", "value")
        ]
        later = ledger.commit(commit_at(Address("score", SPAN)))
        assert (ledger.closed_until(), len(ledger.open_addresses())) == (0, 2 * SPAN + 1)
        ledger.close(0, [commit.address for commit in commits])
        assert (ledger.closed_until(), ledger.open_addresses()) == (SPAN, [later.address])
        for one in (other, ledger, Ledger(url)):
            assert all(one.find(commit.address) == commit for commit in commits)
            assert one.list("score") == [*(c for c in commits if c.address.stage == "score"), later]
            assert one.find(Address("reference", 3)) is None
            assert not one.unknown_files()

    def test_a_late_attempt_at_a_closed_step_loses(self, url: str) -> None:
        """The name of its file is free again."""
        ledger = Ledger(url)
        first = ledger.commit(commit_at(Address("score", 3), "a0-00000000"))
        ledger.close(0, [first.address])
        assert Ledger(url).commit(commit_at(Address("score", 3), "a1-11111111")) == first
        assert ledger.open_addresses() == []

    def test_closing_goes_on_where_it_was_interrupted(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Killed between the segment and the removal of the files."""
        ledger = Ledger(url)
        commit = ledger.commit(commit_at(Address("score", 3)))
        with monkeypatch.context() as patch:
            patch.setattr(files, "remove", lambda root, key: None)
            ledger.close(0, [commit.address])
        assert ledger.open_addresses() == ledger.addresses() == [commit.address]
        again = Ledger(url)
        again.tidy()
        assert again.open_addresses() == []
        assert again.list() == [commit]

    def test_steps_with_a_hole_are_not_closed(self, url: str) -> None:
        ledger = Ledger(url)
        commit = ledger.commit(commit_at(Address("score", 3)))
        with pytest.raises(MissingOutput, match=r"no record of .'value/step_000003"):
            ledger.close(0, [commit.address, Address("value", 3)])
        assert ledger.closed_until() == 0

    def test_a_damaged_record_of_a_segment_can_be_set_aside(self, url: str) -> None:
        """The others have files of their own again."""
        ledger = Ledger(url)
        commits = [ledger.commit(commit_at(Address("score", step))) for step in range(3)]
        ledger.close(0, [commit.address for commit in commits])
        root = files.open_root(url)
        data = bytearray(files.read(root, segment_key(0)) or b"")
        data[data.rindex(b'"rows": 4') + 8] ^= 1
        files.write(root, segment_key(0), bytes(data))
        ledger = Ledger(url)
        with pytest.raises(DamagedCommit, match="segment"):
            ledger.find(commits[2].address)
        ledger.reopen_damaged()
        assert ledger.closed_until() == 0
        assert [ledger.find(commit.address) for commit in commits[:2]] == commits[:2]
        ledger.set_aside(commits[2].address, url + "/../damaged")
        assert ledger.addresses() == [commit.address for commit in commits[:2]]

    def test_a_segment_whose_contents_are_damaged_is_named(self, url: str) -> None:
        ledger = Ledger(url)
        ledger.close(0, [ledger.commit(commit_at(Address("score", 3))).address])
        root = files.open_root(url)
        data = files.read(root, segment_key(0)) or b""
        files.write(root, segment_key(0), data.replace(b'[\\"score\\",3', b'[\\"score\\",4', 1))
        with pytest.raises(DamagedCommit, match=r"steps_000000.segment: is not what was written"):
            Ledger(url).find(Address("score", 3))

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
        assert document["format"] == 2
        assert document["metrics"] == {"a": "NaN", "b": "-Infinity"}
        found = Ledger(url).find(Address("score", 12, 3))
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
from storage.commits import decode
from storage.ledger import Ledger
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
    assert commit.ref() == Ref(commit.address, commit.attempt, {"score": 0.1 + 0.2}, {"kl": {"coef": 0.05}}, 1.5, 2.5)


def rewritten(commit: Commit, *, but: Sequence[str] = (), **change: Any) -> bytes:
    """A record as another version would write it: with a checksum that is right."""
    document = json.loads(encode(commit)) | change
    document = {key: value for key, value in document.items() if key not in ("checksum", *but)}
    body = json.dumps(document, indent=1).removesuffix("\n}").encode()
    checksum = hashlib.sha256(body).hexdigest()[:32].encode()
    return body + b',\n "checksum": "' + checksum + b'"\n}\n'


def test_a_record_on_disk_is_read_and_written_again_to_the_same_bytes() -> None:
    commit = decode(GOLDEN)
    assert commit.metrics == {"score/mean": 0.015625, "score/best": -math.inf, "score/gr\u00f6\u00dfe": 1e-07}
    assert commit.arrays["scores"] == ArrayInfo("float32", (8,), 1990185432)
    assert encode(commit) == GOLDEN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "format 3"),
        ({"surprise": 1}, "surprise"),
        ({"address": {"stage": "score", "step": 0}}, "address.shard"),
        ({"rows": "four"}, "rows"),
    ],
)
def test_other_formats_and_fields_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        decode(rewritten(commit_at(Address("score", 0)), **change))


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(StoreError, match="digest"):
        decode(rewritten(commit_at(Address("score", 0)), digest=None, but=("digest",)))


def leaves(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every number, text, true, false and null of a JSON document, with the way to it."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from leaves(value, (*path, key))
    else:
        yield path, document


def test_a_change_of_any_field_is_detected(tmp_path: Path) -> None:
    """A digit of an update's digest, of the KL controller's state, of a metric, of an input's attempt, ..."""
    ledger, address = Ledger(str(tmp_path)), Address("score", 12, 3)
    ledger.commit(commit_at(address))
    file = tmp_path / f"{address}.json"
    document = json.loads(file.read_bytes())
    ways = [path for path, _ in leaves(document)]
    assert {path[0] for path in ways} == document.keys()
    for path in ways:
        changed = copy.deepcopy(document)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        value = holder[path[-1]]
        holder[path[-1]] = value + 1 if isinstance(value, int | float) else f"{value[:-1]}{chr(ord(value[-1]) ^ 1)}"
        file.write_text(json.dumps(changed))
        with pytest.raises(DamagedCommit, match=re.escape(str(file))):
            ledger.find(address)


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    ledger, address = Ledger(str(tmp_path)), Address("score", 12, 3)
    ledger.commit(commit_at(address))
    file = tmp_path / f"{address}.json"
    good = file.read_bytes()
    for position in range(len(good)):
        file.write_bytes(good[:position] + bytes([good[position] ^ (1 << position % 8)]) + good[position + 1 :])
        with pytest.raises(DamagedCommit, match=re.escape(str(file))):
            ledger.find(address)
    file.write_bytes(good)
    assert ledger.find(address) == commit_at(address)


@pytest.mark.parametrize("content", [b"", b"null", b"[1, 2]", b"{}", b"0"])
def test_what_is_no_record_at_all_is_damage(content: bytes) -> None:
    with pytest.raises(DamagedCommit, match="here: is not what was written"):
        decode(content, "here")


def test_a_record_of_an_earlier_format_is_not_taken_for_damage() -> None:
    """Another version of this program can read it, so nothing is set aside."""
    with pytest.raises(StoreError, match="format 1, this version reads 2") as raised:
        decode(json.dumps({"format": 1, "attempt": "a0"}).encode())
    assert not isinstance(raised.value, DamagedCommit)


def test_another_addresss_record_is_none(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.commit(commit_at(Address("score", 0)))
    (tmp_path / f"{Address('score', 0)}.json").rename(tmp_path / f"{Address('score', 0, 1)}.json")
    with pytest.raises(DamagedCommit, match="holds the commit record of score/step_000000/shard_0000"):
        ledger.find(Address("score", 0, 1))


def test_content_is_what_others_compute_with() -> None:
    """The author, time and duration of an output make no difference to its readers; everything else does."""
    commit = commit_at(Address("score", 0))
    again = replace(commit, attempt="a1-0", finished=9.0, metrics={"score": 7.0}, provenance=replace(PROVENANCE, pid=1))
    assert again.content == commit.content
    others = [
        replace(commit, digest="ab13"),
        replace(commit, state={"kl": {"coef": 0.06}}),
        replace(commit, arrays={"scores": ArrayInfo("float32", (4,), 0xDEADBEEE)}),
        replace(commit, address=Address("score", 1)),
    ]
    assert len({commit.content, *(other.content for other in others)}) == 5
    assert provenance_here(inputs=[commit], seed=0, config_hash="").inputs[0].content == commit.content
    assert decode(encode(commit)).content == commit.content


def test_a_damaged_record_is_set_aside_and_its_address_is_free(tmp_path: Path) -> None:
    ledger, address = Ledger(str(tmp_path / "ledger")), Address("score", 0)
    file = tmp_path / "ledger" / f"{address}.json"
    for content in (b"torn", b"torn again"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        assert Path(ledger.set_aside(address, str(tmp_path / "damaged"))).read_bytes() == content
        assert ledger.find(address) is None
    assert len(list((tmp_path / "damaged").rglob("*.json.*"))) == 2, "one must not replace the other"
    assert ledger.commit(commit_at(address)) == commit_at(address)


def test_a_commit_not_yet_seen_on_this_host_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem may remember for a while that there was no such file."""
    address, slept = Address("advantage", 3), []
    ledger = Ledger(str(tmp_path), Durability(unseen_s=5.0))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            Ledger(str(tmp_path)).commit(commit_at(address))

    monkeypatch.setattr("storage.files.time.sleep", sleep)
    assert ledger.get(address) == commit_at(address)
    assert slept == [0.05, 0.1, 0.2]
    slept.clear()
    with pytest.raises(MissingOutput, match="nothing is committed at advantage/step_000004/shard_0000"):
        ledger.get(Address("advantage", 4))
    assert sum(slept) >= 5.0
    assert max(slept) == 2.0


def test_a_state_that_is_not_finite_is_refused() -> None:
    """The next step computes with it; a metric may be NaN, a controller's state may not."""
    with pytest.raises(ValueError, match="score/step_000000/shard_0000"):
        encode(replace(commit_at(Address("score", 0)), state={"coef": math.nan}))


def test_attempts_have_names_of_their_own() -> None:
    names = {new_attempt(3) for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("a3-") and len(name) == 11 for name in names)
