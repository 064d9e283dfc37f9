"""An embedded engine whose model spans processes: the contract, and what only several ranks can get wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.engines.config import EngineConfig, SpeculationConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.ranks.parallel_runner import ParallelRunner
from stages.engines.embedded.ranks.processes import RankLost
from stages.engines.protocol import GenerationEngine, Request, WeightsError
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from tests.contracts.embedded_engines import CPU, check_a_row_fails_alone, make_engine
from tests.contracts.engine_contract import (
    MAX_SEQ,
    EngineContract,
    assert_same_tokens,
    make_requests,
    random_llama,
    trained_tensors,
)
from tests.support.engines import assert_same_bits, by_row
from tests.support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes


class OnRanks(EngineContract):
    """One engine serves all tests that take a fixture: starting processes costs seconds."""

    tied: bool
    config: dict[str, int]

    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return make_engine(path, max_rows, **self.config)

    @pytest.fixture(scope="class")
    def model(self) -> LlamaForCausalLM:
        return random_llama(0, self.tied)

    @pytest.fixture(scope="class")
    def shared(self, path: Path) -> Iterator[GenerationEngine]:
        with closing(self.make(path)) as engine:
            yield engine

    @pytest.fixture(scope="class")
    def shared_one_slot(self, path: Path) -> Iterator[GenerationEngine]:
        with closing(self.make(path, max_rows=1)) as engine:
            yield engine

    @pytest.fixture
    def engine(self, shared: GenerationEngine, model: LlamaForCausalLM) -> GenerationEngine:
        return as_new(shared, model)

    @pytest.fixture
    def one_slot(self, shared_one_slot: GenerationEngine, model: LlamaForCausalLM) -> GenerationEngine:
        return as_new(shared_one_slot, model)


def as_new(engine: GenerationEngine, model: LlamaForCausalLM) -> GenerationEngine:
    engine.load_weights(0, trained_tensors(model))
    engine.stats()
    return engine


class TestTensorParallel(OnRanks):
    tied, config = True, {"tensor_parallel": 2}


class TestPipelineParallel(OnRanks):
    tied, config = False, {"pipeline_parallel": 2}


@pytest.mark.usefixtures("longest_drafts")
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 40), ("bfloat16", 80)])
def test_stages_give_the_same_bits_as_one_process(dtype: str, rows: int) -> None:
    """Nothing is summed across stages. With little memory and with drafts, rows are preempted while others are in
    flight; some prompts share their first block."""
    sampling = SamplingConfig(max_new_tokens=40, min_new_tokens=40, temperature=0.5)
    requests = [Request(i, 1, 1, tuple(range(3, 13 + i % 11)), 0, sampling) for i in range(rows)]
    with closing(make_engine(RANDOM_TINY, rows, dtype=dtype)) as engine:
        expected = by_row(engine.generate(requests))
    speculation = SpeculationConfig(drafter="ngram")
    settings = {"dtype": dtype, "pipeline_parallel": 2, "speculation": speculation}
    with closing(make_engine(RANDOM_TINY, rows, kv_budget_mb=1, **settings)) as engine:
        assert_same_bits(by_row(engine.generate(requests)), expected)
        stats = engine.stats()
        assert min(stats.preemptions, stats.shared_tokens, sum(stats.drafted_tokens.values())) > 0
        assert len(stats.rank_busy_s) == 2
        assert all(0 < busy < stats.busy_s for busy in stats.rank_busy_s)
        assert_same_bits(by_row(engine.generate(requests[::-1][:5])), {i: expected[i] for i in range(rows - 5, rows)})


def test_tensor_parallel_rows_are_the_same_bits_in_any_batch() -> None:
    """Sums over ranks are in the ranks' order, whatever the size of the pass. Four ranks, two heads of keys and values:
    each is held twice."""
    requests = make_requests(7)
    with closing(make_engine(RANDOM_TINY, 7)) as engine:
        expected = by_row(engine.generate(requests))
    with closing(make_engine(RANDOM_TINY, 7, tensor_parallel=4)) as engine:
        together = by_row(engine.generate(requests))
        assert_same_tokens(together, expected)
        assert_same_bits(by_row(engine.generate(requests[4:5])), {4: together[4]})
        assert_same_bits(by_row(engine.generate(requests[::-1])), together)


def test_both_at_once_on_plain_torch_in_bfloat16() -> None:
    """Two stages of two ranks, greedy, as long as one process's row has the same tokens."""
    requests = make_requests(5, temperature=0.0)
    config = {"dtype": "bfloat16", "kernels": "torch"}
    with closing(make_engine(RANDOM_TINY, **config)) as engine:
        expected = by_row(engine.generate(requests))
    with closing(make_engine(RANDOM_TINY, tensor_parallel=2, pipeline_parallel=2, **config)) as engine:
        assert engine.numerics["kernels"] == "torch"
        for row, completion in by_row(engine.generate(requests)).items():
            same = completion.tokens == expected[row].tokens[: len(completion.tokens)]
            before = len(same) if same.all() else int(same.argmin())
            errors = np.abs(completion.logprobs[:before] - expected[row].logprobs[:before])
            assert before > 2
            assert errors.max() < 0.1  # partial sums are rounded to bfloat16 before they are added


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("busy", [True, False])
def test_a_killed_rank_fails_its_engine(busy: bool) -> None:
    lost: list[str] = []

    def lose(reason: str) -> None:
        time.sleep(0.2)  # whoever waits for the engine still hears of it later
        lost.append(reason)

    settings = EngineConfig(max_rows=2, pipeline_parallel=3)
    before = set(psutil.Process().children())
    engine = build_embedded(RANDOM_TINY, settings, max_seq=250, threads=1, device=CPU, on_lost=lose)
    with closing(engine):
        ranks = sorted(set(psutil.Process().children()) - before, key=lambda process: process.pid)
        assert len(ranks) == 2
        if busy:
            running = engine.generate(make_requests(200, max_new_tokens=200, min_new_tokens=200))
            next(running)
        ranks[1].kill()
        if not busy:
            ranks[0].wait()  # goes with it
            running = engine.generate(make_requests(2))
        with pytest.raises(RuntimeError, match="stopped") as caught:
            list(running)
        assert lost == [str(caught.value.__cause__)]
        assert isinstance(caught.value.__cause__, RankLost)
        assert "rank 2 of 3 of the engine" in str(caught.value.__cause__)
        assert "was ended by SIGKILL" in str(caught.value.__cause__)
        with pytest.raises(RuntimeError, match=r"rank 2 of 3|stopped"):
            engine.load_weights(1, {})
    assert len(lost) == 1
    assert not [process for process in ranks if process.is_running()]


def test_ranks_die_with_their_engine_even_stopped() -> None:
    """A process that owns an engine is killed while one rank is stopped: nobody is left to wake it."""
    program = (
        "import sys, time, torch\n"
        "from stages.engines.config import EngineConfig\n"
        "from stages.engines.embedded.build import build_embedded\n"
        "engine = build_embedded('random:tiny', EngineConfig(tensor_parallel=2), max_seq=64, threads=1,"
        " device=torch.device('cpu'))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "up\n"
        (rank,) = psutil.Process(owner.pid).children()
        rank.suspend()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    _, alive = psutil.wait_procs([rank], timeout=TIMEOUT_S)
    assert not alive


def test_a_refit_that_one_rank_has_no_memory_for_changes_nothing(tmp_path: Path) -> None:
    """Rank 1 may take no more memory, and its part of the head is too large for what it has in hand: it says so, and
    rank 0, which could, keeps its old weights too."""
    config = LlamaConfig(
        vocab_size=150_000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_SEQ,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    before = set(psutil.Process().children())
    requests = make_requests(3)
    with closing(make_engine(tmp_path, pipeline_parallel=2)) as engine:
        (rank,) = set(psutil.Process().children()) - before
        expected = by_row(engine.generate(requests))
        new = {
            "model.embed_tokens.weight": torch.randn(150_000, 64),
            **{f"model.layers.{layer}.mlp.up_proj.weight": torch.randn(64, 64) for layer in range(2)},
        }
        soft, hard = rank.rlimit(psutil.RLIMIT_DATA)
        rank.rlimit(psutil.RLIMIT_DATA, (1, hard))
        with pytest.raises(WeightsError, match=r"rank 1 of 2 cannot take the weights"):
            engine.load_weights(1, new)
        rank.rlimit(psutil.RLIMIT_DATA, (soft, hard))
        assert engine.version == 0
        assert_same_bits(by_row(engine.generate(requests)), expected)
        engine.load_weights(1, new)
        changed = by_row(engine.generate(make_requests(3, version=1)))
        assert all(changed[row].tokens.tolist() != expected[row].tokens.tolist() for row in range(3))


def test_a_swap_is_over_when_every_rank_has_made_it() -> None:
    """Otherwise weights that arrive at once would be based on those before the last."""
    before = set(psutil.Process().children())
    with closing(
        ParallelRunner(RANDOM_TINY, EngineConfig(tensor_parallel=2), max_seq=64, device=CPU, threads=1)
    ) as runner:
        (rank,) = set(psutil.Process().children()) - before
        prepared = runner.prepare({"model.norm.weight": torch.ones(64)})
        rank.suspend()
        swap = threading.Thread(target=runner.swap, args=(prepared,))
        swap.start()
        swap.join(0.5)
        waits = swap.is_alive()
        rank.resume()
        swap.join()
    assert waits


def test_abandoned_rows_leave_after_their_pass() -> None:
    with closing(make_engine(RANDOM_TINY, 4, pipeline_parallel=2)) as engine:
        for _ in range(3):
            running = engine.generate(make_requests(12, min_new_tokens=16))
            next(running)
            running.close()
        engine.load_weights(1, {})
        assert engine.stats().rows < 36
        assert len(by_row(engine.generate(make_requests(5, version=1)))) == 5


@pytest.mark.parametrize("layout", [{"pipeline_parallel": 3}, {"tensor_parallel": 2}], ids=str)
def test_a_row_that_fails_fails_alone_on_ranks(layout: dict[str, int], tmp_path: Path) -> None:
    check_a_row_fails_alone(tmp_path, **layout)
