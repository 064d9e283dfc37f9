"""The weight board: a version exists whole or not at all, is mapped without a copy, and stays while it is leased."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.errors import DamagedWeights, MissingOutput
from storage.weights import WeightBoard, WeightWrite, placed
from tests.support.processes import exit_status

HERE = """
import os, signal, sys
import numpy as np
from storage import weights
board = weights.WeightBoard(sys.argv[1])
"""


@pytest.fixture
def board(tmp_path: Path) -> Iterator[WeightBoard]:
    with WeightBoard(tmp_path / "board") as opened:
        yield opened


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    g = np.random.default_rng(seed)
    return {
        "w": g.standard_normal((3, 5)).astype(np.float32),
        "transposed": np.asfortranarray(g.standard_normal((4, 7))),
        "scalar": np.float32(seed + 1.5) * np.ones(()),
        "empty": np.zeros((0, 4), np.float16),
        "b": g.integers(0, 2**16, 11, dtype=np.uint16),
    }


PLACES = placed([("rows", "float32", (6, 5)), ("columns", "float64", (4, 7)), ("empty", "float16", (0, 4))])


def in_parts() -> dict[str, np.ndarray]:
    g = np.random.default_rng(1)
    return {place.name: g.standard_normal(place.shape).astype(place.dtype) for place in PLACES}


def put(board: WeightBoard, write: WeightWrite, whole: dict[str, np.ndarray], index: int) -> None:
    """Put part `index` of 2: rows of one tensor, columns of another."""
    rows, columns, empty = PLACES
    board.put(write, rows, whole["rows"][4 * index : 4 + 2 * index], 4 * index * 5 * 4)
    cut = [slice(0, 3), slice(3, 7)][index]
    board.put(write, columns, whole["columns"][:, cut], cut.start * 8, 7 * 8)
    board.put(write, empty, whole["empty"])


def run(script: str, directory: Path) -> int:
    return exit_status(HERE + script, directory)


def test_tensors_are_mapped_as_published(board: WeightBoard) -> None:
    manifest = board.publish(12, tensors(), {"b": "bfloat16"})
    with board.open(12) as lease:
        lease.verify()
        assert list(lease.tensors) == list(tensors())
        for name, expected in tensors().items():
            np.testing.assert_array_equal(lease.tensors[name], expected, strict=True)
            assert not lease.tensors[name].flags.writeable
    assert [t.dtype for t in manifest.tensors] == ["float32", "float64", "float64", "float16", "bfloat16"]
    assert all(t.offset % 64 == 0 for t in manifest.tensors)
    assert manifest.num_bytes == 3 * 5 * 4 + 4 * 7 * 8 + 8 + 0 + 11 * 2
    assert board.available() == [12]


def test_bfloat16_keeps_its_bit_pattern(board: WeightBoard) -> None:
    """1.0, -2.0, NaN and the smallest subnormal, as the upper halves of their float32 patterns."""
    pattern = np.array([0x3F80, 0xC000, 0x7FC1, 0x0001], np.uint16)
    board.publish(0, {"b": pattern}, {"b": "bfloat16"})
    with board.open(0) as lease:
        np.testing.assert_array_equal(lease.tensors["b"], pattern, strict=True)
        as_float = (lease.tensors["b"].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(as_float[:2], [1.0, -2.0])
        assert lease.manifest.tensors[0].dtype == "bfloat16"


def test_parts_of_several_writers_make_the_version_that_one_publishes(board: WeightBoard, tmp_path: Path) -> None:
    whole = in_parts()
    with board.begin_write(1, PLACES) as write:
        other = WeightBoard(board.directory)
        assert other.sees(write)
        for writer, index in ((other, 1), (board, 0)):
            put(writer, write, whole, index)
        assert board.available() == []
        sums = board.sums(write, PLACES[1:]) | other.sums(write, PLACES[:1])
        manifest = board.finish(write, sums)
    with WeightBoard(tmp_path / "whole") as alone:
        expected = alone.publish(1, whole)
        assert not alone.sees(write)
        assert (manifest.tensors, manifest.digest) == (expected.tensors, expected.digest)
        assert (board.directory / manifest.file).read_bytes() == (alone.directory / expected.file).read_bytes()
    with board.open(1) as lease:
        lease.verify()
    assert sorted(p.name for p in board.directory.iterdir()) == sorted([manifest.file, "v000001.json"])


def test_a_write_that_fails_leaves_nothing(board: WeightBoard) -> None:
    def failed_write() -> None:
        with board.begin_write(1, PLACES) as write:
            put(board, write, in_parts(), 0)
            raise ConnectionError("a writer is lost")

    with pytest.raises(ConnectionError):
        failed_write()
    assert list(board.directory.iterdir()) == []


def test_parts_of_a_version_that_exists_are_only_compared(board: WeightBoard) -> None:
    whole = in_parts()
    first = board.publish(1, whole)
    before = (board.directory / first.file).read_bytes()
    with board.begin_write(1, PLACES) as write:
        for index in range(2):
            put(board, write, whole, index)
        assert board.finish(write, board.sums(write, PLACES)) == first
        for name in ("rows", "columns"):
            changed = whole[name].copy()
            changed[-1, -1] += 1  # both tensors' last numbers are in part 1
            put(board, write, whole | {name: changed}, 0)
            with pytest.raises(ValueError, match="v1 are published already"):
                put(board, write, whole | {name: changed}, 1)
    with pytest.raises(ValueError, match="v1 are published already"), board.begin_write(1, PLACES[:1]):
        pass
    assert (board.directory / first.file).read_bytes() == before


def test_of_two_writes_the_first_to_finish_wins(board: WeightBoard) -> None:
    whole = in_parts()
    with board.begin_write(1, PLACES) as write:
        winner = WeightBoard(board.directory).publish(1, whole)
        assert winner.file != write.file
        for index in range(2):
            put(board, write, whole, index)
        assert board.finish(write, board.sums(write, PLACES)) == winner
    assert sorted(p.name for p in board.directory.iterdir()) == sorted([winner.file, "v000001.json"])


def test_two_readers_share_the_pages(board: WeightBoard) -> None:
    """Zero copy: a byte changed in the file is seen through a mapping that was made before."""
    manifest = board.publish(0, tensors())
    with board.open(0) as lease:
        with open(board.directory / manifest.file, "r+b") as stream:
            stream.write(np.float32(42).tobytes())
        assert lease.tensors["w"][0, 0] == 42
        with pytest.raises(DamagedWeights, match=f"v0: w is not what was published .*{manifest.file}"):
            lease.verify()


def test_publishing_again_is_harmless_with_the_same_bytes_only(board: WeightBoard) -> None:
    first = board.publish(3, tensors())
    assert board.publish(3, tensors()) == first
    with pytest.raises(ValueError, match="v3 are published already"):
        board.publish(3, tensors(seed=1))
    with pytest.raises(ValueError, match="v3 are published already"):
        board.publish(3, tensors(), {"b": "bfloat16"})
    assert sorted(p.name for p in board.directory.iterdir()) == sorted([first.file, "v000003.json"])


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [({"w": "bfloat16"}, "w: an array of float32 cannot hold bfloat16"), ({"x": "bfloat16"}, r"not there: \['x'\]")],
)
def test_types_that_do_not_fit_are_refused(board: WeightBoard, dtypes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        board.publish(0, tensors(), dtypes)
    assert list(board.directory.iterdir()) == []


def test_a_lease_keeps_its_version(board: WeightBoard) -> None:
    board.publish(1, tensors(1))
    board.publish(2, tensors(2))
    first, second = board.open(1), board.open(1)
    first.close()
    assert board.release(1) is False
    assert board.available() == [1, 2]
    kept = second.tensors["w"]
    second.close()
    assert board.release(1) is True
    assert board.available() == [2]
    np.testing.assert_array_equal(kept, tensors(1)["w"])
    assert not list(board.directory.glob("v000001*"))
    assert board.release(1) is True


def test_a_version_that_is_not_there(board: WeightBoard) -> None:
    board.publish(1, tensors())
    with pytest.raises(MissingOutput, match=r"v2 are not in .*there: \[1\]"):
        board.open(2)
    assert not list(board.directory.glob("v000002*")), "the failed open keeps no lease"


def test_close_removes_the_directory_and_mapped_arrays_survive(board: WeightBoard) -> None:
    board.publish(0, tensors())
    kept = board.open(0).tensors["w"]
    board.close()
    assert not board.directory.exists()
    np.testing.assert_array_equal(kept, tensors()["w"])


@pytest.mark.processes
def test_a_killed_publisher_is_invisible_and_cleaned_up(board: WeightBoard) -> None:
    script = """
weights.os.link = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
board.publish(5, {"w": np.zeros(1000)})
"""
    assert run(script, board.directory) == -signal.SIGKILL
    assert list(board.directory.glob("v000005-*.bin")), "it died before it wrote anything: the test is void"
    assert board.available() == []
    with pytest.raises(MissingOutput):
        board.open(5)
    manifest = board.publish(5, tensors())
    assert sorted(p.name for p in board.directory.iterdir()) == sorted([manifest.file, "v000005.json"])
    with board.open(5) as lease:
        lease.verify()


@pytest.mark.processes
def test_the_lease_of_a_dead_process_does_not_count(board: WeightBoard) -> None:
    board.publish(1, tensors())
    assert run("board.open(1); os._exit(7)", board.directory) == 7
    assert list(board.directory.glob("v000001.lease.*")), "no lease was left: the test is void"
    assert board.release(1) is True
    assert [path.name for path in board.directory.iterdir()] == ["spare.bin"]


@pytest.mark.processes
def test_another_process_reads_the_same_bytes(board: WeightBoard) -> None:
    board.publish(1, {"w": np.arange(6.0).reshape(2, 3)})
    script = "assert board.open(1).tensors['w'].tolist() == [[0, 1, 2], [3, 4, 5]]"
    assert run(script, board.directory) == 0


def test_the_memory_of_a_released_version_is_the_next_ones(board: WeightBoard) -> None:
    board.publish(1, tensors(1))
    inode = (board.directory / board.manifest(1).file).stat().st_ino
    assert board.release(1)
    larger = {"more": np.arange(5000.0)} | tensors(2)
    second = board.publish(2, larger)
    assert (board.directory / second.file).stat().st_ino == inode
    with board.open(2) as lease:
        lease.verify()
    third = board.publish(3, tensors(3))  # no other is free
    assert (board.directory / third.file).stat().st_ino != inode
    assert board.release(2)
    smaller = board.publish(4, tensors(4))
    assert (board.directory / smaller.file).stat().st_size == smaller.file_bytes
    with board.open(4) as lease:
        lease.verify()


def test_a_reader_keeps_the_bytes_of_a_released_version(board: WeightBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader read the manifest after the releaser had looked for leases, and before the manifest was removed."""
    board.publish(1, tensors(1))
    readers = []
    unlink = Path.unlink

    def unlink_and_read(path: Path, missing_ok: bool = False) -> None:
        if path.name == "v000001.json" and not readers:
            readers.append(board.open(1))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_and_read)
    board.release(1)
    monkeypatch.undo()
    board.publish(2, tensors(2))
    with readers[0] as lease:
        for name, expected in tensors(1).items():
            np.testing.assert_array_equal(lease.tensors[name], expected, strict=True)
