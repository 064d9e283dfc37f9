"""One engine, several shards at once: versions never mix, and whatever fails leaves the engine usable."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.workers.versioned_engine import Clock, VersionedEngine
from stages.engines.capabilities import capabilities_of
from stages.engines.config import EngineConfig
from stages.engines.protocol import Completion, EngineLost, EngineStats, MappedTensors, Request, WeightsError
from stages.publish import publish
from storage.errors import DamagedWeights, MissingOutput
from storage.weights import Manifest, WeightBoard


class FakeEngine:
    """Owns a counter of who is inside, by version; `load_weights` fails if anybody is."""

    capabilities = capabilities_of(EngineConfig(), "cpu")

    def __init__(self) -> None:
        self.version = -1
        self.inside = 0
        self.loads: list[int] = []
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.refuse: int | None = None
        self.asleep = False

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not self.asleep
        assert self.inside == 0, f"version {version} was loaded under the feet of a shard of version {self.version}"
        if version == self.refuse:
            raise WeightsError("w holds NaN")
        self.version = version
        self.loads.append(version)
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        yield from ()

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0.0, 0.0, 0, 0.0, 0.0)

    def sleep(self) -> None:
        assert self.inside == 0
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None: ...


@pytest.fixture
def board(tmp_path: Path) -> Iterator[WeightBoard]:
    with WeightBoard(tmp_path / "board") as board:
        for version in range(4):
            board.publish(version, {"w": np.full(3, version, np.float32)})
        yield board


def test_versions_never_mix(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    lock, begin, together = threading.Lock(), threading.Barrier(8), threading.Barrier(2)
    seen: Counter[int] = Counter()
    errors: list[BaseException] = []

    def shard(number: int) -> None:
        try:
            begin.wait(timeout=60)
            for scheduled_step in range(25):
                version = (number + scheduled_step) % 4
                with engine.engine_at(version, Clock()):
                    with lock:
                        fake.inside += 1
                    assert fake.version == version
                    assert fake.tensors["w"].tolist() == [float(version)] * 3
                    with lock:
                        fake.inside -= 1
                    seen[version] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=shard, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    assert seen == {0: 50, 1: 50, 2: 50, 3: 50}

    def stay() -> None:  # two shards of one version are inside at the same time: neither waits for the other to leave
        with engine.engine_at(2, Clock()):
            together.wait(timeout=60)

    pair = [threading.Thread(target=stay) for _ in range(2)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join(timeout=60)
    assert not together.broken


def started_and_waiting(work: Callable[[], None], engine: VersionedEngine) -> threading.Thread:
    """A thread that has come to wait for its turn."""
    thread = threading.Thread(target=work)
    thread.start()
    while not engine._changed._waiters:  # type: ignore[attr-defined]
        assert thread.is_alive()
    return thread


def test_the_next_version_waits_until_the_others_have_left(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    loaded = threading.Event()

    def newer() -> None:
        with engine.engine_at(1, Clock()):
            loaded.set()

    with engine.engine_at(0, Clock()):
        thread = started_and_waiting(newer, engine)
        assert not loaded.is_set()
        assert fake.loads == [0]
    thread.join(timeout=60)
    assert loaded.is_set()
    assert fake.loads == [0, 1]


def test_in_flight_a_newer_version_loads_over_those_inside(board: WeightBoard) -> None:
    """The newer version also serves shards that ask for an older one. An evaluation keeps its version until it has
    left."""
    fake = FakeEngine()
    engine = VersionedEngine(fake, board, in_flight=True)
    with engine.engine_at(1, Clock()), engine.engine_at(2, Clock()), engine.engine_at(1, Clock()):
        assert fake.loads == [1, 2]
    entered = threading.Event()

    def newer() -> None:
        with engine.engine_at(3, Clock()):
            entered.set()

    with engine.engine_at(1, Clock(), exact=True), engine.engine_at(0, Clock()):
        assert fake.loads == [1, 2, 1]
        thread = started_and_waiting(newer, engine)
        assert not entered.is_set()
    thread.join(timeout=60)
    assert entered.is_set()
    assert fake.loads == [1, 2, 1, 3]


def test_an_order_loads_newer_weights_under_rows_in_flight_only(board: WeightBoard) -> None:
    """Without rows nobody needs the new weights. Versions older than the resident one, or removed ones, are ignored. An
    engine that drains never changes weights under its rows."""
    fake = FakeEngine()
    engine = VersionedEngine(fake, board, in_flight=True)
    engine.load_in_flight(1)
    assert fake.loads == []
    with engine.engine_at(0, Clock()):
        engine.load_in_flight(2)
        engine.load_in_flight(1)
        assert fake.loads == [0, 2]
        with pytest.raises(MissingOutput, match="v9"):
            engine.load_in_flight(9)
        with engine.engine_at(1, Clock()):
            assert fake.loads == [0, 2]
    drains = VersionedEngine(draining := FakeEngine(), board)
    with drains.engine_at(0, Clock()):
        drains.load_in_flight(1)
    assert draining.loads == [0]


def test_an_order_waits_for_an_evaluation(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board, in_flight=True)
    with engine.engine_at(1, Clock(), exact=True):
        thread = started_and_waiting(lambda: engine.load_in_flight(2), engine)
        assert fake.loads == [1]
    thread.join(timeout=60)
    assert fake.loads == [1, 2]


def test_in_flight_an_evaluation_waits_for_rows_of_other_versions(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board, in_flight=True)
    entered = threading.Event()

    def evaluate() -> None:
        with engine.engine_at(1, Clock(), exact=True):
            entered.set()

    with engine.engine_at(2, Clock()):
        thread = started_and_waiting(evaluate, engine)
        assert not entered.is_set()
    thread.join(timeout=60)
    assert fake.loads == [2, 1]


def test_a_resident_version_is_not_loaded_again(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    for version in (0, 0, 1, 1, 0):
        with engine.engine_at(version, Clock()):
            pass
    assert fake.loads == [0, 1, 0]


def test_an_exception_inside_leaves_the_engine_usable(board: WeightBoard) -> None:
    engine = VersionedEngine(FakeEngine(), board)
    with pytest.raises(ZeroDivisionError), engine.engine_at(0, Clock()):
        raise ZeroDivisionError
    with engine.engine_at(1, Clock()) as inner:
        assert inner.version == 1


def test_a_load_that_fails_leaves_the_old_version(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    with engine.engine_at(0, Clock()):
        pass
    fake.refuse = 1
    with pytest.raises(WeightsError), engine.engine_at(1, Clock()):
        pytest.fail("weights that do not load let nobody in")
    with pytest.raises(MissingOutput, match="v9"), engine.engine_at(9, Clock()):
        pytest.fail("weights that are not there let nobody in")
    with engine.engine_at(0, Clock()) as inner:
        assert inner.version == 0
    assert fake.loads == [0]
    fake.refuse = None
    with engine.engine_at(1, Clock()) as inner:
        assert inner.version == 1
    assert board.release(1), "a lease was left behind"


def test_a_version_that_is_not_here_is_fetched_while_others_come_and_go(board: WeightBoard) -> None:
    """It is fetched once, and only if the resident weights do not serve; the shard that needs it enters when it has
    arrived."""
    fake, fetched = FakeEngine(), []
    begun, arrived = threading.Event(), threading.Event()

    def fetch(version: int) -> None:
        fetched.append(version)
        begun.set()
        arrived.wait(timeout=60)
        board.publish(version, {"w": np.full(3, version, np.float32)})

    engine = VersionedEngine(fake, board, fetch=fetch)

    def newer() -> None:
        with engine.engine_at(7, Clock()):
            assert fake.tensors["w"].tolist() == [7.0] * 3

    with engine.engine_at(0, Clock()):
        thread = threading.Thread(target=newer)
        thread.start()
        begun.wait(timeout=60)
        with engine.engine_at(0, Clock()):
            assert fake.loads == [0]
        arrived.set()
    thread.join(timeout=60)
    assert fake.loads == [0, 7]
    board.release(7)
    with engine.engine_at(7, Clock()):
        assert fetched == [7]


def test_versions_of_other_tensors_do_not_mix(board: WeightBoard) -> None:
    """Tensors of the older version that the newer one lacks would stay."""
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    board.publish(4, {"w": np.zeros(3, np.float32), "x": np.zeros(3, np.float32)})
    with engine.engine_at(0, Clock()):
        pass
    with pytest.raises(WeightsError, match=r"x .* is missing in weights v0"), engine.engine_at(4, Clock()):
        pytest.fail("these weights let nobody in")
    with engine.engine_at(1, Clock()):
        assert fake.loads == [0, 1]


class _Bfloat16Host:
    """A model host that has nothing but weights in bfloat16."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def publish(self, board: WeightBoard, version: int) -> Manifest:
        return board.publish(version, {"w": self.weights.view(torch.uint16).numpy()}, {"w": "bfloat16"})


def test_bfloat16_weights_reach_the_engine_as_numbers(board: WeightBoard) -> None:
    weights = torch.tensor([1.5, -2.25, 3e-5]).to(torch.bfloat16)
    manifest = publish(_Bfloat16Host(weights), board, 7)  # type: ignore[arg-type]
    assert [t.dtype for t in manifest.tensors] == ["bfloat16"]
    fake = FakeEngine()
    with VersionedEngine(fake, board).engine_at(7, Clock()):
        assert fake.tensors["w"].dtype is torch.bfloat16
        assert torch.equal(fake.tensors["w"], weights)


def test_weights_that_are_not_what_was_published_are_sampled_from_by_nobody(board: WeightBoard) -> None:
    """A bit of the memory flips: the error names tensor and file, the engine keeps what it had."""
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    manifest = board.manifest(1)
    file = board.directory / manifest.file
    with engine.engine_at(0, Clock()):
        pass
    with file.open("r+b") as stream:
        stream.seek(manifest.tensors[0].offset + 2)
        stream.write(b"\x01")
    with pytest.raises(DamagedWeights, match=f"v1: w is not what was published .*{file}"), engine.engine_at(1, Clock()):
        pytest.fail("these weights let nobody in")
    assert fake.loads == [0]
    assert board.release(1), "the lease was given back"
    board.publish(1, {"w": np.full(3, 1, np.float32)})
    with engine.engine_at(1, Clock()):
        assert fake.loads == [0, 1]


def test_an_engine_that_rests_wakes_for_the_next_shard(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    engine.sleep()
    assert fake.asleep
    with engine.engine_at(1, Clock()):
        assert not fake.asleep
    engine.sleep()
    engine.sleep()
    assert fake.asleep
    with engine.engine_at(1, Clock()), engine.engine_at(1, Clock()):
        assert not fake.asleep
    assert fake.loads == [1], "it has the weights still"


def test_an_engine_with_a_shard_in_it_does_not_rest(board: WeightBoard) -> None:
    fake = FakeEngine()
    engine = VersionedEngine(fake, board)
    with engine.engine_at(0, Clock()), pytest.raises(RuntimeError, match="1 shards are in the engine"):
        engine.sleep()
    assert not fake.asleep


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_remote_engine_need_not_read_again_what_was_summed(board: WeightBoard, dtype: str, bad: float) -> None:
    """Bytes are read here once, for sums and for what is not finite; an engine of this process looks itself."""
    fake = FakeEngine()
    fake.capabilities = capabilities_of(EngineConfig(kind="vllm"), "cpu")
    given: list[MappedTensors] = []
    fake.load_weights = lambda version, tensors: given.append(tensors)  # type: ignore[assignment, arg-type]
    engine = VersionedEngine(fake, board)
    numbers = torch.linspace(-3e30, 3e30, 200_001).to(getattr(torch, dtype))
    spoilt = numbers.clone()
    spoilt[150_000] = bad
    for version, tensor in ((7, numbers), (8, spoilt)):
        is_bfloat16 = dtype == "bfloat16"
        array = tensor.view(torch.uint16).numpy() if is_bfloat16 else tensor.numpy()
        board.publish(version, {"w": array}, {"w": "bfloat16"} if is_bfloat16 else {})
    with engine.engine_at(7, Clock()):
        assert given[0].finite
    with pytest.raises(WeightsError, match="w has numbers that are not finite"), engine.engine_at(8, Clock()):
        pass
    assert len(given) == 1


def test_an_engine_whose_refit_failed_half_way_serves_nobody(board: WeightBoard) -> None:
    """An engine that has lost its old weights by then refuses calls. Otherwise it serves them."""
    for kind, serves in (("embedded", True), ("vllm", False)):
        fake = FakeEngine()
        fake.capabilities = capabilities_of(EngineConfig(kind=kind), "cpu")  # type: ignore[arg-type]
        engine = VersionedEngine(fake, board)
        with engine.engine_at(0, Clock()):
            pass
        loaded, fake.load_weights = fake.load_weights, _fail  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="out of memory"), engine.engine_at(1, Clock()):
            pass
        fake.load_weights = loaded  # type: ignore[method-assign]
        if serves:
            with engine.engine_at(0, Clock()):
                assert fake.loads == [0]
        else:
            with pytest.raises(EngineLost, match="weights v1 failed half-way"):
                engine.engine_at(0, Clock()).__enter__()


def _fail(version: int, tensors: Mapping[str, torch.Tensor]) -> None:
    raise RuntimeError("out of memory")
