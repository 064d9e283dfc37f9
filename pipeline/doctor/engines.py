"""The doctor's tests of generation engines: start, keyed draws (`stages/engines/protocol.py`), refit (loading new
weights), sleep and speed. Each engine runs in a process of its own (`generate.py`).

Every engine is compared with the reference: the embedded engine on the CPU, in float32 with plain torch kernels.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from pipeline.doctor.jobs import Dtype, EngineJob, EngineResult, GeneratedRow
from pipeline.doctor.processes import Program, run_together
from pipeline.doctor.runner import DoctorSettings, Fault, Finding, NotApplicable
from pipeline.doctor.training import ADVICE as TRAINING_ADVICE
from pipeline.doctor.training import device_indices
from stages.engines.remote.process import ENVIRONMENTS, environment_problem
from stages.models.hf_weights import write_model
from stages.models.spec import is_random, read_config, read_spec
from storage.codec import decode, encode

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest accepted difference between the log-probs of the same token in two compared results (`row_problem`), in nats.
Rounding alone causes differences of 1e-6 in float32 and 0.06 in bfloat16."""
MIN_EQUAL_FRACTION: dict[Dtype, float] = {"float32": 1.0, "bfloat16": 0.5}
"""Smallest accepted fraction of equal tokens. Two compared rows count as equal up to the first token in which they
differ.

Rounding to 16 bits sometimes changes a token, and the rest of the row then differs (measured fraction: 0.8). The
fraction is about 0 for unrelated draws."""
CONTEXT_TOKENS = 1024
"""Context length of the random model that is written to files for the engines."""
PROGRAM = ("-m", "pipeline.doctor.generate")
ADVICE = "the engine's kernels compute wrong numbers here: try engine.embedded.kernels=torch, send the JSON report"


def embedded(settings: DoctorSettings) -> Finding:
    """Test the embedded engine with the kernels that a run would choose, on every GPU, or on the CPU if there is no
    GPU."""
    on_gpu = torch.cuda.is_available()
    model = _test_model(settings)
    groups = [
        tuple(
            EngineJob(model, "embedded", dtype, threads=settings.threads, device=f"cuda:{index}" if on_gpu else "cpu")
            for dtype in TOLERANCE
        )
        for index in device_indices()
    ]
    return _test(settings, model, groups)


def vllm(settings: DoctorSettings) -> Finding:
    """Test vLLM in its own Python environment."""
    return _remote(settings, "vllm")


def tensorrt_llm(settings: DoctorSettings) -> Finding:
    """Test TensorRT-LLM in its own Python environment. This test has never been run."""
    return _remote(settings, "tensorrt_llm")


def _remote(settings: DoctorSettings, kind: Literal["vllm", "tensorrt_llm"]) -> Finding:
    """Test an engine in its own Python environment, on the device that it chooses. On a CPU only float32 is tested,
    because the engine takes minutes to start."""
    python = settings.engines.get(kind)
    if python is None:
        raise NotApplicable(f"no environment of {kind} (--engine {kind}=PYTHON)")
    problem = environment_problem(python, ENVIRONMENTS[kind])
    if problem is not None:
        raise Fault(f"{python}: {problem}", f"make the environment of {kind} again (docs/engine.md)")
    model = _test_model(settings)
    dtypes: list[Dtype] = ["float32", "bfloat16"] if torch.cuda.is_available() else ["float32"]
    log = str(settings.scratch / f"{kind}.log")
    jobs = (EngineJob(model, kind, dtype, python=python, threads=settings.threads, log=log) for dtype in dtypes)
    return _test(settings, model, [tuple(jobs)])


def _test(settings: DoctorSettings, model: str, groups: Sequence[tuple[EngineJob, ...]]) -> Finding:
    """Run test jobs on engines, the groups at the same time, and compare them with the embedded engine on the CPU, in
    float32 with plain torch kernels. Jobs for the CPU run in the process of this reference. Raises Fault."""
    reference = EngineJob(model, "embedded", "float32", kernels="torch", threads=settings.threads, device="cpu")
    jobs = [job for group in groups for job in group]
    on_cpu = jobs[0].device == "cpu"  # then one process runs all jobs, so it loads the libraries once
    programs = [(reference, *jobs)] if on_cpu else [(reference,), *groups]
    results = _run(tuple(programs), settings.deadline_s)
    facts = {f"{job.device or job.kind} {job.dtype}": dict(_facts(results[job])) for job in jobs}
    for job in jobs:
        _check_result(job, results[job], results[reference], facts)
    result = results[jobs[0]]
    refit = f"new weights at {_refit_rate(result) / 1e9:.2f} GB/s"
    rates = f"start {result.start_s:.1f} s, {result.tokens_per_s:.0f} tokens/s, {refit}"
    draws = "draws as plain torch does" if result.draws == "keyed" else f"its draws are {result.draws}, not compared"
    kinds = ", and in ".join(
        {"float32": "float32", "bfloat16": "bfloat16 but for rounding"}[job.dtype] for job in groups[0]
    )
    on = f", on {len(groups)} GPUs" if len(groups) > 1 else ""
    return Finding(f"{draws} in {kinds}{on}; {rates}", facts)


def _check_result(job: EngineJob, result: EngineResult, reference: EngineResult, facts: dict[str, Any]) -> None:
    """Raise Fault unless other weights give other log-probs, and, if draws are keyed, the first rows agree with the
    reference's, with rows generated alone, and with rows after other weights came and went. Rounding is accepted."""
    who = f"{job.kind} in {job.dtype} on {job.device or 'its own device'}"
    if all(changed.logprobs == first.logprobs for changed, first in zip(result.changed, result.first, strict=True)):
        raise Fault(f"{who}: new weights change nothing", "it keeps its old weights: send the JSON report", **facts)
    if result.draws != "keyed":
        return
    pairs = (
        (result.first, reference.first, "the reference's rows"),
        (result.alone, result.first[: len(result.alone)], "its own rows beside others"),
        (result.again, result.first, "its own rows before new weights came and went"),
    )
    for rows, expected, whose in pairs:
        if (problem := row_problem(rows, expected, job.dtype)) is not None:
            raise Fault(f"{who}: {problem}, compared with {whose}", ADVICE, **facts)


def row_problem(rows: Sequence[GeneratedRow], expected: Sequence[GeneratedRow], dtype: Dtype) -> str | None:
    """Compare `rows` with `expected`. Return a description of a difference that is larger than rounding explains, or
    None if there is no such difference.

    Log-probs are compared up to the first token that differs, because the tokens after it have another context."""
    same = 0
    for index, (row, other) in enumerate(zip(rows, expected, strict=True)):
        differs = np.not_equal(row.tokens, other.tokens)
        kept = int(differs.argmax()) if differs.any() else len(differs)
        same += kept
        largest = float(np.abs(np.subtract(row.logprobs[:kept], other.logprobs[:kept])).max(initial=0.0))
        if not largest <= TOLERANCE[dtype]:
            return f"log-probs of row {index} differ by {largest:.2g} nats"
    share = same / sum(len(row.tokens) for row in expected)
    return (
        None
        if share >= MIN_EQUAL_FRACTION[dtype]
        else f"only {share:.0%} of the tokens come before the first that differs"
    )


def _facts(result: EngineResult) -> Iterator[tuple[str, Any]]:
    for name in ("draws", "start_s", "tokens_per_s", "refit_s", "slept"):
        yield name, getattr(result, name)
    yield "refit_bytes_per_s", _refit_rate(result)


def _refit_rate(result: EngineResult) -> float:
    return result.refit_bytes / max(result.refit_s, 1e-9)


def _test_model(settings: DoctorSettings) -> str:
    """Return the model with which engines are tested. A random model is copied to files, with a context of
    `CONTEXT_TOKENS`, if its own is shorter or engines in other environments need files."""
    model = settings.model
    if not is_random(model) or (read_spec(model).max_positions >= CONTEXT_TOKENS and not settings.engines):
        return model
    folder = settings.scratch / "model"
    if not folder.exists():
        write_model(folder, model, {}, "float32")
        config = read_config(str(folder)) | {"max_position_embeddings": CONTEXT_TOKENS}
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@cache
def _run(groups: tuple[tuple[EngineJob, ...], ...], deadline_s: float) -> dict[EngineJob, EngineResult]:
    """Run groups of jobs at the same time, each group in a process of its own. Return job -> result. The results are
    cached."""
    with tempfile.TemporaryDirectory(prefix="stageline-doctor-") as folder:
        results = [Path(folder, f"{number}.json") for number in range(len(groups))]
        programs = [
            Program(
                f"{group[-1].kind} ({group[-1].device or 'its own device'})", [*PROGRAM, encode(group), str(result)]
            )
            for group, result in zip(groups, results, strict=True)
        ]
        run_together(programs, deadline_s, TRAINING_ADVICE)
        by_job: dict[EngineJob, EngineResult] = {}
        for group, result in zip(groups, results, strict=True):
            by_job |= dict(zip(group, decode(list[EngineResult], result.read_bytes()), strict=True))
        return by_job
