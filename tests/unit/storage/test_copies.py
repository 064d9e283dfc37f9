"""Checkpoints and exports that are uploaded to an object store: complete with their manifest only, found from another
directory, and removed from both places."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import files
from storage.checkpoints import MANIFEST, Checkpoints
from storage.errors import StoreError
from storage.exports import RECORD, Exports, export_faults, write_sums


@pytest.fixture
def store() -> Iterator[files.Root]:
    """fsspec's store in memory."""
    root = files.open_root(f"memory://{uuid.uuid4().hex}")
    yield root
    files.remove_tree(root.below(".."), root.path.rpartition("/")[2])


@pytest.fixture
def first(tmp_path: Path, store: files.Root) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "first", store=store)
    for version in (2, 4, 6):
        save(checkpoints, version)
    return checkpoints


@pytest.fixture
def second(tmp_path: Path, store: files.Root, first: Checkpoints) -> Checkpoints:
    """The same checkpoints, seen from another directory."""
    return Checkpoints(tmp_path / "second", store=store)


def save(checkpoints: Checkpoints, version: int) -> None:
    path = checkpoints.begin("policy", version)
    (path / "rank0").mkdir()
    (path / "rank0" / "model.bin").write_text(f"weights {version}")
    (path / "common.json").write_text("{}")
    checkpoints.finish("policy", version, path, {"version": version})


def test_another_directory_downloads_what_it_lacks(second: Checkpoints) -> None:
    assert second.newest_first("policy", 5) == [4, 2]
    with pytest.raises(StoreError, match="no complete checkpoint"):
        second.verify("policy", 4)
    second.fetch("policy", 4)
    assert second.verify("policy", 4) == {"version": 4}
    assert (second.place("policy", 4) / "rank0" / "model.bin").read_text() == "weights 4"
    assert [path.name for path in (second.root / "policy").iterdir()] == ["v000004"]
    second.forget("policy", 4)
    assert not second.place("policy", 4).exists()
    assert second.newest_first("policy", 5) == [4, 2]


def test_a_checkpoint_counts_when_it_is_whole_in_the_store(first: Checkpoints, store: files.Root) -> None:
    files.remove(store, "policy/v000004/rank0/model.bin")
    files.write(store, "policy/v000006/rank0/model.bin", b"cut")
    assert first.versions("policy") == [2]
    assert first.newest_first("policy", 9) == [6, 4, 2], "the local ones can be used"


@pytest.mark.parametrize("lost", ["rank0/model.bin", MANIFEST])
def test_a_lost_upload_is_named_and_leaves_nothing(second: Checkpoints, store: files.Root, lost: str) -> None:
    files.remove(store, f"policy/v000006/{lost}")
    with pytest.raises(StoreError, match=r"v000006.*(is missing|no complete checkpoint)"):
        second.fetch("policy", 6)
    assert list(second.root.rglob("*")) == []


def test_an_interrupted_upload_is_made_again(first: Checkpoints, second: Checkpoints, store: files.Root) -> None:
    files.remove(store, f"policy/v000006/{MANIFEST}")
    files.write(store, "policy/v000006/of_another_layout.bin", b"left")
    assert second.versions("policy") == [2, 4]
    save(first, 6)
    assert second.versions("policy") == [2, 4, 6]
    second.fetch("policy", 6)
    assert not (second.place("policy", 6) / "of_another_layout.bin").exists()


def test_what_the_store_has_with_another_size_is_no_upload(
    tmp_path: Path, store: files.Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "upload", lambda root, key, file: files.write(root, key, b"cut"))
    checkpoints = Checkpoints(tmp_path, store=store)
    with pytest.raises(StoreError, match=r"has 3 bytes of \d, after it was uploaded"):
        save(checkpoints, 2)
    assert checkpoints.versions("policy") == []


def test_prune_counts_those_in_the_store_and_removes_both(first: Checkpoints, store: files.Root) -> None:
    files.remove(store, "policy/v000006/common.json")
    files.write(store, "policy/v000003/common.json", b"left by an upload that was interrupted")
    first.prune("policy", keep=1)
    assert first.versions("policy") == [4]
    assert files.names(store.below("policy")) == ["v000004", "v000006"]
    assert sorted(path.name for path in (first.root / "policy").iterdir()) == ["v000004", "v000006"]


def test_exports_are_uploaded_before_they_get_their_name(tmp_path: Path, store: files.Root) -> None:
    here, there = Exports(tmp_path / "here", store), Exports(tmp_path / "there", store)
    for version in (1, 2):
        staged = here.staged(version)
        here.begin(version)
        (staged / "model.safetensors").write_text(f"weights {version}")
        write_sums(staged)
        assert here.clear_unfinished(9) == there.clear_unfinished(9) == [version]
        here.finish(version, staged)
    assert here.clear_unfinished(9) == there.clear_unfinished(9) == []
    assert there.versions() == [1, 2]
    assert there.fetch(3) is None
    fetched = there.fetch(2)
    assert fetched == there.place(2)
    assert list(export_faults(there.place(2))) == []
    here.drop([1, 7])
    assert here.versions() == there.versions() == [2]
    assert [path.name for path in here.root.iterdir()] == ["v000002"]
    files.remove(store, f"v000002/{RECORD}")
    shutil.rmtree(here.root)
    assert here.versions() == []
    assert here.fetch(2) is None


def test_an_export_that_was_uploaded_but_not_renamed_is_finished(tmp_path: Path, store: files.Root) -> None:
    exports = Exports(tmp_path, store)
    exports.staged(1).mkdir()
    write_sums(exports.staged(1))
    exports.finish(1, exports.staged(1)).rename(exports.staged(1))  # as if the process had died before the rename
    assert exports.clear_unfinished(1) == []
    assert exports.staged(1).exists(), "it may be in progress"
    assert exports.clear_unfinished(2) == []
    assert not exports.staged(1).exists()
    assert exports.fetch(1) == exports.place(1)
