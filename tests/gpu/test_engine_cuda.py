"""The engine's contract on a CUDA device, with every kind of kernels; and what captured passes must keep."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.engines.config import SpeculationConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.runner import LocalRunner, all_tensors
from stages.engines.protocol import Completion, GenerationEngine
from tests.contracts.engine_contract import (
    MAX_SEQ,
    EngineContract,
    assert_close_in_bfloat16,
    assert_greedy_of,
    greedy_requests,
    make_requests,
    random_llama,
    trained_tensors,
)
from tests.support.engine_settings import embedded
from tests.support.engines import assert_same_bits, by_row
from tests.support.families import FAMILIES, random_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def make_engine(path: Path, max_rows: int = 4, *, in_flight: bool = False, **config: object) -> EmbeddedEngine:
    settings = embedded(max_rows, **config)
    return build_embedded(str(path), settings, max_seq=MAX_SEQ, threads=1, device=CUDA, in_flight=in_flight)


class ContractOnCuda(EngineContract):
    company_atol = 5e-5
    """cuBLAS chooses its algorithm, and so the order of sums, by the number of rows: 2.1e-5 was measured on an H200."""


class TestPlainTorchOnCuda(ContractOnCuda):
    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return make_engine(path, max_rows, kernels="torch")


@needs_triton
class TestTritonOnCuda(ContractOnCuda):
    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return make_engine(path, max_rows, kernels="triton")


@needs_triton
class TestTritonWithoutGraphsOnCuda(ContractOnCuda):
    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return make_engine(path, max_rows, kernels="triton", cuda_graphs=False)


@needs_triton
class TestTritonInFlightOnCuda(ContractOnCuda):
    """A single caller's rows finish before it loads, so the contract holds for this way of updating too."""

    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return make_engine(path, max_rows, kernels="triton", in_flight=True)

    def test_load_waits_for_rows_in_flight(self) -> None:
        pytest.skip("rows in flight go on under the new weights")

    def test_load_returns_only_after_the_rows_in_flight(self) -> None:
        pytest.skip("rows in flight go on under the new weights")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    random_llama(0, tied=True).save_pretrained(directory)
    return directory


def generate(path: Path, num: int = 12, **config: object) -> dict[int, Completion]:
    with closing(make_engine(path, **{"max_rows": 6, **config})) as engine:
        return by_row(engine.generate(make_requests(num, min_new_tokens=16)))


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit(path: Path, dtype: str) -> None:
    """Passes are padded to the same sizes either way, so the products take the same algorithms."""
    replayed, eager = (generate(path, kernels="triton", dtype=dtype, cuda_graphs=graphs) for graphs in (True, False))
    assert_same_bits(replayed, eager)


@needs_triton
def test_triton_and_torch_draw_the_same_tokens(path: Path) -> None:
    triton, plain = (generate(path, kernels=kernels) for kernels in ("triton", "torch"))
    for row, completion in plain.items():
        np.testing.assert_array_equal(triton[row].tokens, completion.tokens)
        np.testing.assert_allclose(triton[row].logprobs, completion.logprobs, atol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
def test_bfloat16_stays_close(path: Path, kernels: str) -> None:
    """Weights, cache and the operands of the head's product are bfloat16, the logits are not: they have more than its
    8 bits, so log-probs of one distribution take many values."""
    model = random_llama(0, tied=True)
    requests = make_requests(6, min_new_tokens=16)
    completions = generate(path, 6, kernels=kernels, dtype="bfloat16")
    assert_close_in_bfloat16(model, requests, completions)
    sampled = np.concatenate([c.logprobs for c in completions.values()])
    rounded = torch.from_numpy(sampled).bfloat16().float().numpy()
    assert (sampled != rounded).mean() > 0.9


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_draws_what_transformers_says(tmp_path: Path, family: str, kernels: str) -> None:
    old, new = (random_model(family, seed) for seed in (0, 1))
    old.save_pretrained(tmp_path)
    with closing(make_engine(tmp_path, kernels=kernels)) as engine:
        assert_greedy_of(old, by_row(engine.generate(greedy_requests())), greedy_requests())
        engine.load_weights(1, dict(new.named_parameters()))
        assert_greedy_of(new, by_row(engine.generate(greedy_requests(1))), greedy_requests(1))


@pytest.mark.usefixtures("longest_drafts")
@needs_triton
@pytest.mark.parametrize("drafter", ["ngram"])
def test_drafts_change_no_token(path: Path, drafter: str) -> None:
    drafted = generate(path, kernels="triton", speculation=SpeculationConfig(drafter=drafter))
    for row, completion in generate(path, kernels="triton").items():
        np.testing.assert_array_equal(drafted[row].tokens, completion.tokens)
        np.testing.assert_allclose(drafted[row].logprobs, completion.logprobs, atol=1e-4)


@needs_triton
def test_rows_that_are_preempted_go_on_with_the_same_tokens(path: Path) -> None:
    """No megabyte is small enough to run out of with this model, so the pool is cut down."""
    expected = generate(path, kernels="triton")
    with closing(make_engine(path, max_rows=6, kernels="triton")) as engine:
        pool = engine._scheduler.pool
        held = [pool.take() for _ in range(pool.num_free - 5)]
        completions = by_row(engine.generate(make_requests(12, min_new_tokens=16)))
        assert engine.stats().preemptions > 0
        pool.release(held)
    for row, completion in expected.items():
        np.testing.assert_array_equal(completions[row].tokens, completion.tokens)


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refit_leaves_the_weights_where_graphs_read_them(path: Path, dtype: str) -> None:
    settings = embedded(4, kernels="triton", dtype=dtype)
    with closing(LocalRunner(str(path), settings, max_seq=MAX_SEQ, device=CUDA)) as runner:
        before = [tensor.data_ptr() for tensor in all_tensors(runner._weights)]
        old = [tensor.clone() for tensor in all_tensors(runner._weights)]
        runner.swap(runner.prepare(trained_tensors(random_llama(1, tied=True))))
        assert [tensor.data_ptr() for tensor in all_tensors(runner._weights)] == before
        changed = zip(all_tensors(runner._weights), old, strict=True)
        assert all(not torch.equal(new, was) for new, was in changed)


@needs_triton
def test_weights_may_come_from_the_device(path: Path) -> None:
    """As they do from a trainer in the same process."""
    other = random_llama(1, tied=True)
    found = []
    for device in ("cpu", "cuda"):
        with closing(make_engine(path, kernels="triton")) as engine:
            engine.load_weights(1, {name: tensor.to(device) for name, tensor in trained_tensors(other).items()})
            found.append(by_row(engine.generate(make_requests(4, version=1))))
    for row, completion in found[0].items():
        np.testing.assert_array_equal(found[1][row].tokens, completion.tokens)
