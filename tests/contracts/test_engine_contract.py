"""The contract of generation engines for the plain embedded engine, and what only it promises. `test_plain_engine` runs
this file where drafts, ranks and migration cannot be imported."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.scheduler import BATCH_PROMPT_TOKENS
from stages.engines.protocol import GenerationEngine, Request, WeightsError
from stages.models.config import SamplingConfig
from stages.models.hf_files import read_tokenizer
from stages.models.spec import RANDOM_TINY
from stages.native.compile import NoNativeKernelsError
from tests.contracts.embedded_engines import CPU, make_engine
from tests.contracts.engine_contract import (
    EngineContract,
    InFlightContract,
    assert_close_in_bfloat16,
    make_requests,
    random_llama,
)
from tests.support.engines import assert_same_bits, by_row
from tests.support.paths import SMOLLM2
from tests.support.processors import KERNELS, needs_compiler


class Embedded(InFlightContract, EngineContract):
    kernels: str

    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return make_engine(path, max_rows, kernels=self.kernels)

    def make_in_flight(self, path: Path) -> GenerationEngine:
        return make_engine(path, 8, in_flight=True, kernels=self.kernels)


@pytest.mark.full  # `make test` has it by `test_plain_engine`
class TestEmbeddedEngineOnPlainTorch(Embedded):
    kernels = "torch"


@needs_compiler
class TestEmbeddedEngineOnNativeKernels(Embedded):
    kernels = "native"


@pytest.mark.parametrize("kernels", KERNELS)
def test_bfloat16_weights_stay_close(kernels: str, tmp_path: Path) -> None:
    model = random_llama(0, tied=True)
    model.save_pretrained(tmp_path)
    requests = make_requests(6, min_new_tokens=16)
    with closing(make_engine(tmp_path, 6, dtype="bfloat16", kernels=kernels)) as engine:
        completions = by_row(engine.generate(requests))
    assert_close_in_bfloat16(model, requests, completions)


def test_incomplete_directory_is_refused(tmp_path: Path) -> None:
    """`load_weights` may bring some tensors; a model to start from must have all."""
    model = random_llama(0, tied=True)
    tensors = dict(model.state_dict())
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight is missing"):
        make_engine(tmp_path)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_in_any_batch(dtype: str, kernels: str) -> None:
    """Stronger than the contract, on a CPU: not only the tokens, every log-prob bit for bit."""
    requests = make_requests(7)
    with closing(make_engine(RANDOM_TINY, 7, dtype=dtype, kernels=kernels)) as engine:
        together = by_row(engine.generate(requests))
    with closing(make_engine(RANDOM_TINY, 2, dtype=dtype, kernels=kernels)) as engine:
        assert_same_bits(by_row(engine.generate(requests[::-1])), together)
        assert_same_bits(by_row(engine.generate(requests[4:5])), {4: together[4]})


@pytest.mark.parametrize("kernels", KERNELS)
def test_same_bits_with_two_threads(kernels: str) -> None:
    """Few tokens: two OpenMP threads on a busy machine spend their time waiting for each other."""
    requests = make_requests(3, max_new_tokens=2, min_new_tokens=2)
    with (
        closing(make_engine(RANDOM_TINY, kernels=kernels)) as one,
        closing(make_engine(RANDOM_TINY, threads=2, kernels=kernels)) as two,
    ):
        assert_same_bits(by_row(two.generate(requests)), by_row(one.generate(requests)))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 24), ("bfloat16", 48)])
def test_same_bits_when_rows_are_preempted(dtype: str, rows: int, kernels: str) -> None:
    """random:tiny: 2 tensors * 4 layers * 2 heads * 16 dims * 4 bytes = 1 KiB a token, so 1 MiB holds 64 blocks of 16
    (128 in bfloat16); rows of up to 60 tokens need 4 each. The rows that are sent back are prefilled again, response
    included."""
    settings = SamplingConfig(max_new_tokens=40, min_new_tokens=40)
    requests = [Request(i, 1, 1, tuple(range(3, 13 + i % 11)), 0, settings) for i in range(rows)]
    with closing(make_engine(RANDOM_TINY, rows, kv_budget_mb=16, dtype=dtype, kernels=kernels)) as engine:
        expected = by_row(engine.generate(requests))
        assert engine.stats().preemptions == 0
    with closing(make_engine(RANDOM_TINY, rows, kv_budget_mb=1, dtype=dtype, kernels=kernels)) as engine:
        assert_same_bits(by_row(engine.generate(requests)), expected)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.kv_peak_fraction == 1.0


@pytest.mark.parametrize("kernels", KERNELS)
def test_same_bits_with_a_shared_prompt(kernels: str) -> None:
    """Six rows of one prompt of 40 tokens: its first two blocks are computed once, also where the rows start in one
    pass; a row alone computes all of it."""
    prompt = tuple(range(10, 50))
    settings = SamplingConfig(max_new_tokens=8, min_new_tokens=8)
    requests = [Request(i, 1, 1, prompt, 0, settings) for i in range(6)]
    with closing(make_engine(RANDOM_TINY, 4, kernels=kernels)) as engine:
        together = by_row(engine.generate(requests))
        stats = engine.stats()
        assert (stats.shared_tokens, stats.prompt_tokens) == (5 * 32, 6 * 40 - 5 * 32)
        assert stats.preemptions == 0
        for request in requests:
            engine.sleep()  # forgets the prompt's blocks
            engine.wake()
            assert_same_bits(by_row(engine.generate([request])), {request.row: together[request.row]})
        assert engine.stats().shared_tokens == 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_prompt_is_fed_once_until_weights_or_memory_change(in_flight: bool, tmp_path: Path) -> None:
    """Rows that do not meet share the prompt's blocks too; not those of older weights, nor of memory given back."""
    random_llama(seed=1, tied=True).save_pretrained(tmp_path)
    prompt = tuple(range(3, 40))
    sampling = SamplingConfig(max_new_tokens=6)
    with closing(make_engine(tmp_path, 1, in_flight=in_flight)) as engine:

        def shared_tokens(row: int, version: int) -> int:
            engine.stats()
            (found,) = engine.generate([Request(row, 0, 0, prompt, version, sampling)])
            with closing(make_engine(tmp_path, 1)) as fresh:
                (expected,) = fresh.generate([Request(row, 0, 0, prompt, 0, sampling)])
            np.testing.assert_array_equal(found.logprobs, expected.logprobs)
            return engine.stats().shared_tokens

        assert [shared_tokens(row, 0) for row in range(3)] == [0, 32, 32]
        engine.load_weights(1, {})
        assert [shared_tokens(row, 1) for row in range(2)] == [0, 32]
        engine.sleep()
        engine.wake()
        assert shared_tokens(2, 1) == 0


def test_long_prompts_are_fed_in_pieces() -> None:
    """More prompt tokens than a pass takes: the tokens are those of every row alone."""
    settings = SamplingConfig(max_new_tokens=4, min_new_tokens=4)
    rng = np.random.default_rng(0)
    requests = [Request(i, 1, 1, tuple(rng.integers(3, 256, 60 - i).tolist()), 0, settings) for i in range(12)]
    assert sum(len(r.tokens) for r in requests) > BATCH_PROMPT_TOKENS
    with closing(make_engine(RANDOM_TINY, 12)) as engine:
        together = by_row(engine.generate(requests))
        for request in requests[-3:]:
            assert_same_bits(by_row(engine.generate([request])), {request.row: together[request.row]})


def test_tied_head_comes_with_its_embedding_or_not_at_all(tmp_path: Path) -> None:
    model = random_llama(0, tied=True)
    model.save_pretrained(tmp_path)
    embedding = torch.randn_like(model.lm_head.weight)
    with closing(make_engine(tmp_path)) as engine:
        engine.load_weights(1, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
        with pytest.raises(WeightsError, match=r"lm_head\.weight is tied"):
            engine.load_weights(2, {"lm_head.weight": embedding})
        assert engine.version == 1


def test_kv_budget_too_small_for_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.kv_budget_mb is 0; one row of 64 tokens needs 1"):
        make_engine(RANDOM_TINY, kv_budget_mb=0)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(UserWarning, match="plain torch, which is slower: there is no C compiler"):
        engine = make_engine(RANDOM_TINY)
    with closing(engine):
        assert engine.numerics["kernels"] == "torch"
    with pytest.raises(NoNativeKernelsError, match="no C compiler"):
        make_engine(RANDOM_TINY, kernels="native")


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.max_rows is 0"):
        make_engine(RANDOM_TINY, max_rows=0)
    with pytest.raises(ValueError, match=r"max_seq is 257.* 256 tokens"):
        build_embedded(RANDOM_TINY, EngineConfig(), max_seq=257, threads=1, device=CPU)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        make_engine("nowhere")


def test_closed_iterator_takes_its_rows_with_it() -> None:
    """Six rows on one slot, closed after the first: the engine is free for the next call, and drains."""
    with closing(make_engine(RANDOM_TINY, max_rows=1)) as engine:
        requests = make_requests(6, min_new_tokens=16)
        running = engine.generate(requests)
        next(running)
        running.close()
        engine.load_weights(1, {})
        assert engine.stats().rows < 6


def test_sleep_is_refused_with_rows_in_flight() -> None:
    with closing(make_engine(RANDOM_TINY, max_rows=1)) as engine:
        running = engine.generate(make_requests(6, min_new_tokens=16))
        next(running)
        with pytest.raises(RuntimeError, match="rows are in flight"):
            engine.sleep()
        assert len(list(running)) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_engine_notifies_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers get the reason instead of waiting for ever."""

    def fail() -> None:
        raise OSError("the machine is on fire")

    with closing(make_engine(RANDOM_TINY)) as engine:
        monkeypatch.setattr(engine._runner, "collect", fail)
        with pytest.raises(RuntimeError, match="engine has stopped: OSError: the machine is on fire") as caught:
            list(engine.generate(make_requests(3)))
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(RuntimeError, match="engine has stopped: OSError: the machine is on fire"):
            engine.load_weights(2, {})


@pytest.mark.smollm2
def test_smollm2_greedy_equals_transformers() -> None:
    tokenizer = read_tokenizer(str(SMOLLM2))
    prompts = [tokenizer.encode("The capital of France is"), tokenizer.encode("I watched this film and")]
    with closing(make_engine(SMOLLM2)) as engine:
        requests = [Request(i, 0, 0, tuple(p), 0, SamplingConfig(12, temperature=0.0)) for i, p in enumerate(prompts)]
        completions = by_row(engine.generate(requests))
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert completions[i].tokens.tolist() == expected.tolist()
        assert "Paris" in tokenizer.decode(completions[0].tokens.tolist())
