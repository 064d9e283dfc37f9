"""Rungs of the generation engines: start, keyed draws, refit, sleep, speed.

Every engine is compared with the embedded one on the CPU with plain torch kernels, in float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import numpy as np
import torch

from pipeline.doctor.ladder import Absent, DoctorSettings, Fault, Finding
from stages.engines.build import build_engine
from stages.engines.config import EmbeddedConfig, EngineConfig
from stages.engines.protocol import Completion, EngineLost, GenerationEngine, Request, WeightsError
from stages.engines.remote.process import ENVIRONMENTS, environment_problem
from stages.models.config import SamplingConfig
from stages.models.hf_weights import read_weights, write_model
from stages.models.spec import is_random, read_spec

PROMPTS, NEW_TOKENS, MAX_SEQ = 8, 24, 64
TOLERANCE = 1e-3
"""Largest accepted difference of a log-prob from the reference's, in nats."""


def embedded(settings: DoctorSettings) -> Finding:
    """Test the embedded engine with the kernels that a run would choose."""
    return _test(settings, settings.model, EngineConfig())


def vllm(settings: DoctorSettings) -> Finding:
    """Test vLLM in its environment."""
    return _remote(settings, "vllm")


def tensorrt_llm(settings: DoctorSettings) -> Finding:
    """Test TensorRT-LLM in its environment. Never run yet."""
    return _remote(settings, "tensorrt_llm")


def _remote(settings: DoctorSettings, kind: Literal["vllm", "tensorrt_llm"]) -> Finding:
    python = settings.engines.get(kind)
    if python is None:
        raise Absent(f"no environment of {kind} (--engine {kind}=PYTHON)")
    problem = environment_problem(python, ENVIRONMENTS[kind])
    if problem is not None:
        raise Fault(f"{python}: {problem}", f"make the environment of {kind} again (docs/engine.md)")
    model = settings.model
    if is_random(model):  # these engines read files
        folder = settings.scratch / f"model-{kind}"
        write_model(folder, model, {}, "float32")
        model = str(folder)
    return _test(settings, model, EngineConfig(kind=kind, python=python))


def _test(settings: DoctorSettings, model: str, config: EngineConfig) -> Finding:
    requests = list(_requests(read_spec(model).vocab_size))
    plain = EngineConfig(embedded=EmbeddedConfig(kernels="torch"))
    with _built(model, plain, settings, torch.device("cpu")) as reference:
        expected = _by_row(reference.generate(requests))
    began = time.perf_counter()
    with _built(model, config, settings) as engine:
        started = time.perf_counter() - began
        return _look_at(engine, model, requests, expected, started)


def _look_at(
    engine: GenerationEngine,
    model: str,
    requests: Sequence[Request],
    expected: Mapping[int, Completion],
    started: float,
) -> Finding:
    keyed = engine.capabilities.draws == "keyed"
    began = time.perf_counter()
    found = _by_row(engine.generate(requests))
    rate = sum(len(row.tokens) for row in found.values()) / (time.perf_counter() - began)
    facts: dict[str, Any] = {"start_s": started, "tokens_per_s": rate, "draws": engine.capabilities.draws}
    if keyed:
        _compare(found, expected, "the reference's")
        for request in requests[:2]:  # in other company
            _compare(_by_row(engine.generate([request])), found, "those of the whole batch")
    weights = read_weights(model)
    began = time.perf_counter()
    try:
        engine.load_weights(1, {name: tensor * 1.5 for name, tensor in weights.items()})
    except WeightsError as error:
        raise Fault(f"new weights are refused: {error}", "send the JSON report") from error
    refit_s = time.perf_counter() - began
    refit_rate = sum(tensor.nbytes for tensor in weights.values()) / refit_s
    facts |= {"refit_s": refit_s, "refit_bytes_per_s": refit_rate}
    changed = _by_row(engine.generate([_at_version(request, 1) for request in requests]))
    if all(np.array_equal(changed[row].logprobs, found[row].logprobs) for row in found):
        raise Fault("new weights change nothing", "the engine keeps its old weights: send the JSON report", **facts)
    engine.load_weights(2, weights)
    if engine.capabilities.sleeps != "nothing":
        engine.sleep()
        engine.wake()
        if engine.version != 2:  # its weights were freed too
            engine.load_weights(2, weights)
        facts["slept"] = True
    again = _by_row(engine.generate([_at_version(request, 2) for request in requests]))
    if keyed:
        _compare(again, found, "those before the refit")
    draws = "keyed draws equal the reference's" if keyed else f"draws are {engine.capabilities.draws}"
    return Finding(f"{draws}; start {started:.1f} s, {rate:.0f} tokens/s, refit {refit_rate / 1e9:.2f} GB/s", facts)


def _compare(found: Mapping[int, Completion], expected: Mapping[int, Completion], whose: str) -> None:
    """Compare the rows of `found`. Raises Fault for another token or a log-prob beyond the tolerance."""
    advice = "the engine's kernels compute wrong numbers here: try engine.embedded.kernels=torch, send the JSON report"
    for row, completion in found.items():
        if not np.array_equal(completion.tokens, expected[row].tokens):
            raise Fault(f"row {row} has other tokens than {whose}", advice)
        differs = float(np.abs(completion.logprobs - expected[row].logprobs).max())
        if not differs <= TOLERANCE:
            raise Fault(f"log-probs of row {row} differ from {whose} by {differs:.2g} nats", advice)


def _requests(vocabulary: int) -> Iterator[Request]:
    """Yield requests with random prompts of different lengths, the same on every machine."""
    rng = np.random.default_rng(0)
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    for row in range(PROMPTS):
        prompt = tuple(int(token) for token in rng.integers(3, vocabulary, 4 + 3 * row))
        yield Request(row, 0, 0, prompt, 0, sampling)


def _at_version(request: Request, version: int) -> Request:
    return Request(request.row, request.seed, request.step, request.tokens, version, request.sampling)


def _by_row(completions: Iterator[Completion]) -> dict[int, Completion]:
    return {completion.row: completion for completion in completions}


def _built(
    model: str, config: EngineConfig, settings: DoctorSettings, device: torch.device | None = None
) -> closing[GenerationEngine]:
    log = settings.scratch / f"{config.kind}.log" if config.kind != "embedded" else None
    try:
        engine = build_engine(model, config, max_seq=MAX_SEQ, threads=settings.threads, device=device, log=log)
    except (EngineLost, OSError) as error:
        output = log.read_text(errors="replace")[-4000:] if log is not None and log.exists() else ""
        raise Fault(
            f"the engine does not start: {error}", f"look at the end of {log or 'the JSON report'}", output=output
        ) from error
    return closing(engine)
