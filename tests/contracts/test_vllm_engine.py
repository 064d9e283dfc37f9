"""The contract of engines on vLLM, in the environment that `make engine-vllm` makes; skipped where there is none.

vLLM starts in a quarter of a minute, so one engine serves as many tests as can share it.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stages.engines.build import build_engine
from stages.engines.capabilities import vllm_capabilities
from stages.engines.config import EngineConfig
from stages.engines.protocol import EngineLost, GenerationEngine, Request
from stages.engines.remote.process import ENVIRONMENTS, environment_problem
from stages.models.config import SamplingConfig
from tests.contracts.engine_contract import (
    MAX_SEQ,
    OneServer,
    assert_same_tokens,
    contract_of,
    make_requests,
    oracle_logprobs,
    random_llama,
    trained_tensors,
)
from tests.support.engines import by_row

PYTHON = os.environ.get("STAGELINE_VLLM_PYTHON", str(Path(__file__).resolve().parents[2] / ".engines/vllm/bin/python"))
HEAD_DIM = 32
"""The smallest head dimension that vLLM's attention supports on a CPU."""

ROUNDING = 1e-4
"""Nats: of two ways to sum."""

pytestmark = [
    pytest.mark.skipif(
        environment_problem(PYTHON, ENVIRONMENTS["vllm"]) is not None,
        reason="no environment with vLLM: make engine-vllm",
    ),
]


def make_vllm(path: Path, max_rows: int = 4, *, in_flight: bool = False, **config: object) -> GenerationEngine:
    settings = EngineConfig(kind="vllm", python=PYTHON, max_rows=max_rows, kv_budget_mb=64, **config)  # type: ignore[arg-type]
    return build_engine(str(path), settings, max_seq=MAX_SEQ, threads=1, in_flight=in_flight)


class TestVllmEngine(OneServer, contract_of(vllm_capabilities(EngineConfig(kind="vllm"), "cpu"))):
    head_dim = HEAD_DIM

    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return make_vllm(path, max_rows)

    def make_in_flight(self, path: Path) -> GenerationEngine:
        return make_vllm(path, 8, in_flight=True)

    @pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
    def test_tokens_and_logprobs_are_the_embedded_engines(
        self, engine: GenerationEngine, path: Path, temperature: float
    ) -> None:
        """Law 4 across engines: suppression, minimum length, temperature, end of sequence."""
        requests = make_requests(9, temperature=temperature, suppress_token_ids=[5, 40, 41], min_new_tokens=6)
        with closing(build_engine(str(path), EngineConfig(max_rows=4), max_seq=MAX_SEQ, threads=1)) as embedded:
            expected = by_row(embedded.generate(requests))
        assert_same_tokens(by_row(engine.generate(requests)), expected, ROUNDING)

    def test_rows_that_nobody_waits_for_leave(self, engine: GenerationEngine) -> None:
        running = engine.generate(make_requests(9, min_new_tokens=16))
        next(running)
        running.close()
        engine.stats()
        assert len(by_row(engine.generate(make_requests(4)))) == 4
        stats = engine.stats()
        assert 4 <= stats.rows < 9
        assert 0 < stats.kv_peak_fraction <= 1
        assert 0 < stats.mean_occupancy <= 1


def test_prompts_of_older_weights_are_not_shared(tmp_path: Path) -> None:
    """vLLM shares blocks of 128 tokens. A row in flight and a new one have the prompt of a row that has finished."""
    old, new = random_llama(0, True, HEAD_DIM), random_llama(1, True, HEAD_DIM)
    old.config.max_position_embeddings = 300
    old.save_pretrained(tmp_path)
    prompt = tuple(range(3, 93)) * 3
    sampling = SamplingConfig(20, 20, temperature=0.0)
    requests = [Request(row, 0, 0, prompt, 0, sampling) for row in range(4)]
    settings = EngineConfig(kind="vllm", python=PYTHON, max_rows=1, kv_budget_mb=64)
    with closing(build_engine(str(tmp_path), settings, max_seq=290, threads=1, in_flight=True)) as engine:
        running = engine.generate(requests[:3])
        found = [next(running)]
        engine.load_weights(1, trained_tensors(new))
        found += [*running, *engine.generate(requests[3:])]
    for completion in found:
        for version, model in ((0, old), (1, new)):
            expected = oracle_logprobs(model, requests[0], completion.tokens)
            made = completion.versions == version
            np.testing.assert_array_equal(completion.tokens[made], expected.argmax(-1).numpy()[made])
            np.testing.assert_allclose(completion.logprobs[made], expected.max(-1).values.numpy()[made], atol=ROUNDING)
    assert [set(completion.versions.tolist()) for completion in (found[0], found[3])] == [{0}, {1}]


def test_a_model_that_vllm_does_not_support_is_refused_in_its_own_words(tmp_path: Path) -> None:
    """This side knows the family by its `model_type`; vLLM goes by the architecture's name."""
    random_llama(0, True, HEAD_DIM).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text("utf8").replace("LlamaForCausalLM", "NoSuchForCausalLM"), "utf8")
    with pytest.raises(EngineLost, match=r"(?s)vllm_adapter.* could not start: .*NoSuchForCausalLM.*its last output:"):
        make_vllm(tmp_path)


@pytest.mark.full
def test_ranks_in_processes_of_their_own_draw_alike_and_map_new_weights(tmp_path: Path) -> None:
    """Before and after a refit, whose tensors no queue of vLLM's carries."""
    random_llama(0, True, HEAD_DIM).save_pretrained(tmp_path)
    found = []
    for ranks in (1, 2):
        with closing(make_vllm(tmp_path, tensor_parallel=ranks)) as engine:
            before = by_row(engine.generate(make_requests(4)))
            engine.load_weights(1, trained_tensors(random_llama(1, True, HEAD_DIM)))
            found.append((before, by_row(engine.generate(make_requests(4, version=1)))))
    for one, two in zip(*found, strict=True):
        assert_same_tokens(one, two, ROUNDING)
