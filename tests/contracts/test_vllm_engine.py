"""The contract of engines on vLLM, in the environment that `make engine-vllm` makes; skipped where there is none.

vLLM starts in a quarter of a minute, so one engine serves as many tests as can share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from stages.engines.build import build_engine
from stages.engines.config import EngineConfig
from stages.engines.protocol import EngineLost, GenerationEngine, WeightsError
from stages.engines.remote.environment import ENVIRONMENTS, environment_problem
from tests.contracts.engine_contract import (
    MAX_SEQ,
    assert_same_tokens,
    make_requests,
    oracle_logprobs,
    random_llama,
    trained_tensors,
)
from tests.support.engines import by_row

PYTHON = os.environ.get("STAGELINE_VLLM_PYTHON", str(Path(__file__).resolve().parents[2] / ".engines/vllm/bin/python"))
HEAD_DIM = 32
"""Of those that vLLM's attention knows on a CPU, the smallest."""

ROUNDING = 1e-4
"""Nats: of two ways to sum."""

pytestmark = [
    pytest.mark.skipif(
        environment_problem(PYTHON, ENVIRONMENTS["vllm"]) is not None,
        reason="no environment with vLLM: make engine-vllm",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return random_llama(0, request.param, HEAD_DIM)


@pytest.fixture(scope="module")
def path(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[GenerationEngine]:
    config = EngineConfig(kind="vllm", python=PYTHON, slots=4, kv_budget_mb=64)
    with closing(build_engine(str(path), config, max_seq=MAX_SEQ, threads=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def embedded(path: Path) -> Iterator[GenerationEngine]:
    with closing(build_engine(str(path), EngineConfig(slots=4), max_seq=MAX_SEQ, threads=1)) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_and_logprobs_are_the_embedded_engines(
    engine: GenerationEngine, embedded: GenerationEngine, temperature: float
) -> None:
    """Law 4 across engines: suppression, minimum length, temperature, end of sequence."""
    requests = make_requests(9, temperature=temperature, suppress_token_ids=[5, 40, 41], min_new_tokens=6)
    assert_same_tokens(by_row(engine.generate(requests)), by_row(embedded.generate(requests)), ROUNDING)


def test_given_tokens_come_back_with_their_logprobs(engine: GenerationEngine, model: LlamaForCausalLM) -> None:
    drawn = by_row(engine.generate(make_requests(3, temperature=0.7, suppress_token_ids=[5])))
    again = [
        replace(
            request,
            sampling=replace(request.sampling, max_new_tokens=len(drawn[request.row].tokens)),
            forced=tuple(drawn[request.row].tokens.tolist()),
        )
        for request in make_requests(3, temperature=0.7, suppress_token_ids=[5])
    ]
    assert_same_tokens(by_row(engine.generate(again)), drawn, ROUNDING)


def test_refit_is_the_new_model_and_bad_weights_change_nothing(
    engine: GenerationEngine, model: LlamaForCausalLM
) -> None:
    """The head too, where it is tied; and the prefix cache is forgotten."""
    before = by_row(engine.generate(make_requests(4, version=engine.version)))
    bad = trained_tensors(model)
    bad["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        engine.load_weights(5, bad)
    assert_same_tokens(by_row(engine.generate(make_requests(4, version=engine.version))), before, ROUNDING)
    for version, seed in ((7, 1), (8, 0)):
        other = random_llama(seed, model.config.tie_word_embeddings, HEAD_DIM)
        engine.load_weights(version, trained_tensors(other))
        requests = make_requests(4, version=version)
        found = by_row(engine.generate(requests))
        for request in requests:
            completion = found[request.row]
            expected = oracle_logprobs(other, request, completion.tokens)
            chosen = expected[range(len(completion.tokens)), completion.tokens.tolist()]
            np.testing.assert_allclose(completion.logprobs, chosen.numpy(), atol=1e-4)
    assert_same_tokens(found, before, ROUNDING)


def test_rows_that_nobody_waits_for_leave(engine: GenerationEngine) -> None:
    running = engine.generate(make_requests(9, version=engine.version, min_new_tokens=16))
    next(running)
    running.close()
    engine.stats()
    assert len(by_row(engine.generate(make_requests(4, version=engine.version)))) == 4
    stats = engine.stats()
    assert 4 <= stats.rows < 9
    assert 0 < stats.kv_peak_fraction <= 1
    assert 0 < stats.mean_occupancy <= 1


def test_a_model_that_vllm_does_not_support_is_refused_in_its_own_words(tmp_path: Path) -> None:
    """This side knows the family by its `model_type`; vLLM goes by the architecture's name."""
    random_llama(0, True, HEAD_DIM).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text("utf8").replace("LlamaForCausalLM", "NoSuchForCausalLM"), "utf8")
    config = EngineConfig(kind="vllm", python=PYTHON, slots=4, kv_budget_mb=64)
    with pytest.raises(EngineLost, match=r"(?s)vllm_adapter.* could not start: .*NoSuchForCausalLM.*it said last:"):
        build_engine(str(tmp_path), config, max_seq=MAX_SEQ, threads=1)
