"""Copies of weights from another host: whole or not there at all, checked, received by one process at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.errors import DamagedWeights, MissingOutput, StoreError
from storage.weight_copies import IncomingVersion, OutgoingVersion, is_copy, receiving
from storage.weights import WeightBoard
from tests.support.processes import start_python

PAGE = os.sysconf("SC_PAGE_SIZE")

HALF = """
import resource, signal, sys
from storage.weight_copies import *
from storage.weights import WeightBoard
there, here = WeightBoard(sys.argv[1]), WeightBoard(sys.argv[2])
"""


@pytest.fixture
def there(tmp_path: Path) -> Iterator[WeightBoard]:
    """The board of the host that publishes."""
    with WeightBoard(tmp_path / "there") as board:
        yield board


@pytest.fixture
def here(tmp_path: Path) -> Iterator[WeightBoard]:
    with WeightBoard(tmp_path / "here") as board:
        yield board


def tensors() -> dict[str, np.ndarray]:
    """Six pages; two tensors begin in the middle of one, one lies within one, one has no bytes."""
    g = np.random.default_rng(0)
    return {
        "first": g.standard_normal(2 * PAGE // 4 + 5, dtype=np.float32),
        "small": g.integers(0, 2**16, 11, dtype=np.uint16),
        "empty": np.zeros((0, 3)),
        "last": g.standard_normal((PAGE // 8, 4)),
    }


def pieces(board: WeightBoard, version: int, num_bytes: int) -> list[memoryview]:
    with OutgoingVersion(board, version) as outgoing:
        total = outgoing.num_ready()
        whole = outgoing.read(0, total)
    return [whole[start : start + num_bytes] for start in range(0, total, num_bytes)]


def start(script: str, *boards: WeightBoard) -> subprocess.Popen[str]:
    return start_python(HALF + script, *(board.directory for board in boards))


@pytest.mark.parametrize("num_bytes", [997, PAGE, 2 * PAGE + 64, 1 << 20])
def test_a_copy_is_what_was_published(there: WeightBoard, here: WeightBoard, num_bytes: int) -> None:
    manifest = there.publish(7, tensors(), {"small": "bfloat16"})
    with IncomingVersion(here, manifest) as incoming:
        for piece in pieces(there, 7, num_bytes):
            incoming.append(piece)
        copied = incoming.finish()
    assert (copied.version, copied.tensors, copied.digest) == (7, manifest.tensors, manifest.digest)
    assert is_copy(copied)
    assert not is_copy(manifest)
    with here.open(7) as lease:
        lease.verify()
        for name, expected in tensors().items():
            np.testing.assert_array_equal(lease.tensors[name], expected, strict=True)
        assert here.release(7) is False
    assert here.release(7) is True
    assert list(here.directory.iterdir()) == []


def test_a_version_without_a_byte(there: WeightBoard, here: WeightBoard) -> None:
    manifest = there.publish(0, {"empty": np.zeros((0, 4), np.float16)})
    with IncomingVersion(here, manifest) as incoming:
        for piece in pieces(there, 0, PAGE):
            incoming.append(piece)
        incoming.finish()
    assert here.open(0).tensors["empty"].shape == (0, 4)


def test_half_a_version_is_there_for_nobody_but_whoever_hands_it_on(there: WeightBoard, here: WeightBoard) -> None:
    manifest = there.publish(7, tensors())
    first, *rest = pieces(there, 7, 2 * PAGE)
    with IncomingVersion(here, manifest) as incoming:
        incoming.append(first)
        assert not here.has(7)
        assert here.available() == []
        with pytest.raises(MissingOutput):
            here.open(7)
        with pytest.raises(StoreError, match=f"v7: {2 * PAGE} of {manifest.file_bytes} bytes arrived"):
            incoming.finish()
        with OutgoingVersion(here, 7, manifest.digest) as outgoing:
            assert outgoing.num_ready() == 2 * PAGE
            assert outgoing.read(PAGE, PAGE) == first[PAGE:]
            for piece in rest:
                incoming.append(piece)
            assert outgoing.num_ready() == manifest.file_bytes
            incoming.finish()
            here.release(7)
            last = manifest.file_bytes // PAGE * PAGE
            assert outgoing.read(0, last) == b"".join([first, *rest])[:last], "what is being sent stays readable"


def test_given_up_it_leaves_nothing(there: WeightBoard, here: WeightBoard) -> None:
    manifest = there.publish(7, tensors())
    incoming = IncomingVersion(here, manifest)
    incoming.append(pieces(there, 7, PAGE)[0])
    with OutgoingVersion(here, 7) as outgoing:
        incoming.close()
        assert list(here.directory.iterdir()) == []
        with pytest.raises(MissingOutput, match="whoever received them is gone"):
            outgoing.num_ready()
    with pytest.raises(MissingOutput, match="v7 are not in"):
        OutgoingVersion(here, 7)


def test_only_the_version_that_is_wanted_is_sent(there: WeightBoard) -> None:
    manifest = there.publish(7, tensors())
    OutgoingVersion(there, 7, manifest.digest).close()
    with pytest.raises(MissingOutput):
        OutgoingVersion(there, 7, "another")


@pytest.mark.parametrize(("byte", "name"), [(0, "first"), (2 * PAGE + 64, "small"), (-1, "last")])
def test_a_flipped_bit_is_found(there: WeightBoard, here: WeightBoard, byte: int, name: str) -> None:
    manifest = there.publish(7, tensors())
    whole = bytearray(pieces(there, 7, manifest.file_bytes)[0])
    whole[byte] ^= 4

    def receive() -> None:
        with IncomingVersion(here, manifest) as incoming:
            for at in range(0, len(whole), 1000):
                incoming.append(memoryview(whole)[at : at + 1000])
            incoming.finish()

    with pytest.raises(DamagedWeights, match=f"v7: {name} did not arrive as it was published"):
        receive()
    assert list(here.directory.iterdir()) == []


def test_more_bytes_than_there_are(there: WeightBoard, here: WeightBoard) -> None:
    manifest = there.publish(7, tensors())
    [whole] = pieces(there, 7, manifest.file_bytes)
    with IncomingVersion(here, manifest) as incoming:
        incoming.append(whole)
        with pytest.raises(DamagedWeights, match=f"more than {manifest.file_bytes} bytes"):
            incoming.append(whole[:1])


def test_a_version_that_exists_already_wins(there: WeightBoard, here: WeightBoard) -> None:
    manifest = there.publish(7, tensors())
    with IncomingVersion(here, manifest) as incoming:
        for piece in pieces(there, 7, PAGE):
            incoming.append(piece)
        own = here.publish(7, tensors())
        assert incoming.finish() == own
    assert sorted(p.name for p in here.directory.iterdir()) == sorted([own.file, "v000007.json"])


def test_tidying_removes_what_is_not_wanted(there: WeightBoard) -> None:
    wanted, unwanted = there.publish(1, tensors()), there.publish(2, {"w": np.zeros(3)})
    torn = there.directory / "v000003-4194305-deadbeef.copy"  # above the largest process id that there can be
    torn.touch()
    there.tidy(lambda manifest: manifest.digest == wanted.digest)
    assert there.available() == [1]
    assert not (there.directory / unwanted.file).exists()
    assert not torn.exists()


@pytest.mark.processes
def test_one_process_receives_and_the_next_takes_over_when_it_is_killed(there: WeightBoard, here: WeightBoard) -> None:
    manifest = there.publish(7, tensors())
    script = f"""
with receiving(here, 7, wait_s=9) as ours, OutgoingVersion(there, 7) as outgoing:
    incoming = IncomingVersion(here, outgoing.manifest)
    incoming.append(outgoing.read(0, {PAGE}))
    print("half", flush=True)
    signal.pause()
"""
    with start(script, there, here) as process:
        assert process.stdout.readline() == "half\n"
        [left] = here.directory.glob("*.copy")
        assert left.stat().st_size == PAGE
        with receiving(here, 7, wait_s=0) as ours:
            assert not ours
        taken: list[bool] = []
        killed = threading.Event()

        def take_over() -> None:
            with receiving(here, 7, wait_s=60) as ours:
                taken.extend([ours, killed.is_set(), left.exists()])
                with IncomingVersion(here, manifest) as incoming:
                    for piece in pieces(there, 7, PAGE):
                        incoming.append(piece)
                    incoming.finish()

        thread = threading.Thread(target=take_over)
        thread.start()
        assert taken == []
        killed.set()
        process.send_signal(signal.SIGKILL)
        process.wait()
        thread.join()
    assert taken == [True, True, False], "it received after the other, and removed what that one left"
    with here.open(7) as lease:
        lease.verify()
    here.release(7)
    assert list(here.directory.iterdir()) == []


@pytest.mark.processes
def test_a_full_memory_leaves_nothing(there: WeightBoard, here: WeightBoard) -> None:
    """A limit on the length of files stands for it: the write fails half-way, as on a full disk."""
    there.publish(7, tensors())
    script = f"""
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({PAGE + 100}, {PAGE + 100}))
with receiving(here, 7, wait_s=9), OutgoingVersion(there, 7) as outgoing:
    try:
        with IncomingVersion(here, outgoing.manifest) as incoming:
            incoming.append(outgoing.read(0, {PAGE}))
            incoming.append(outgoing.read({PAGE}, {PAGE}))
    except OSError as error:
        print(error.errno, incoming.num_bytes, flush=True)
"""
    with start(script, there, here) as process:
        assert process.communicate()[0] == f"27 {PAGE}\n"
    assert list(here.directory.iterdir()) == []
