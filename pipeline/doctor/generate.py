"""Generate rows with engines, in a process of its own: `python -m pipeline.doctor.generate JOBS RESULT`.

For each job the engine is started and generates rows. Then it loads other weights, and the first weights again. If it
can sleep, it is put to sleep and woken up. The rows and the times of all jobs are written to the file RESULT.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipeline.doctor.jobs import EngineJob, EngineResult, GeneratedRow
from pipeline.doctor.processes import MAX_OUTPUT_CHARS
from stages.engines.build import build_engine
from stages.engines.config import EmbeddedConfig, EngineConfig
from stages.engines.protocol import EngineLost, GenerationEngine, Request
from stages.models.config import SamplingConfig
from stages.models.hf_weights import read_weights
from stages.models.spec import read_spec
from storage.codec import decode, encode
from storage.host import end_with_parent

PROMPTS = (4, 9, 16, 25, 30, 100, 245, 300, 520)
"""Lengths of the prompts in tokens. Kernels in Triton and C split contexts of more than 256 tokens. The row with 245
prompt tokens exceeds this length during decoding, and the context of the last row has three parts."""
NEW_TOKENS = 24
MAX_SEQ = max(PROMPTS) + NEW_TOKENS


def measure_engine(job: EngineJob) -> EngineResult:
    """Test the engine of a job. Return its rows and its speed. Errors of the engine are passed on."""
    spec = read_spec(job.model)
    requests = [*_random_requests(spec.vocab_size, min(MAX_SEQ, spec.max_positions))]
    config = EngineConfig(
        kind=job.kind, python=job.python, dtype=job.dtype, embedded=EmbeddedConfig(kernels=job.kernels)
    )
    began = time.perf_counter()
    device = None if job.device is None else torch.device(job.device)
    with closing(_build_engine(job, config, device)) as engine:
        started = time.perf_counter() - began
        began = time.perf_counter()
        first = _generate_rows(engine, requests, 0)
        rate = sum(len(row.tokens) for row in first) / (time.perf_counter() - began)
        alone = [row for request in requests[:2] for row in _generate_rows(engine, [request], 0)]
        weights = read_weights(job.model)
        began = time.perf_counter()
        engine.load_weights(1, {name: tensor * 1.5 for name, tensor in weights.items()})
        refit_s = time.perf_counter() - began
        changed = _generate_rows(engine, requests, 1)
        engine.load_weights(2, weights)
        sleeps = engine.capabilities.sleeps != "nothing"
        if sleeps:
            engine.sleep()
            engine.wake()
            if engine.version != 2:  # sleeping has freed the weights too
                engine.load_weights(2, weights)
        return EngineResult(
            device=job.device or "its own device",
            draws=engine.capabilities.draws,
            start_s=started,
            tokens_per_s=rate,
            refit_s=refit_s,
            refit_bytes=sum(tensor.nbytes for tensor in weights.values()),
            slept=sleeps,
            first=first,
            alone=alone,
            changed=changed,
            again=_generate_rows(engine, requests, 2),
        )


def _build_engine(job: EngineJob, config: EngineConfig, device: torch.device | None) -> GenerationEngine:
    """Build the engine of a job, and return it. If the engine does not start, print the end of its log file
    (`EngineJob.log`) and raise the error."""
    log = None if job.log is None else Path(job.log)
    try:
        max_seq = min(MAX_SEQ, read_spec(job.model).max_positions)
        return build_engine(job.model, config, max_seq=max_seq, threads=job.threads, device=device, log=log)
    except (EngineLost, OSError):
        if log is not None and log.exists():
            print(log.read_text(errors="replace")[-MAX_OUTPUT_CHARS:], flush=True)
        raise


def _random_requests(vocabulary: int, longest: int) -> Iterator[Request]:
    """Yield requests with random prompts of different lengths, the same on every machine. `longest`: prompt and
    response."""
    rng = np.random.default_rng(0)
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    for row, length in enumerate(PROMPTS):
        tokens = rng.integers(3, vocabulary, min(length, longest - NEW_TOKENS))
        yield Request(row, 0, 0, tuple(map(int, tokens)), 0, sampling)


def _generate_rows(engine: GenerationEngine, requests: Sequence[Request], version: int) -> list[GeneratedRow]:
    """Generate a row for each request, in their order, with this version of the weights."""
    generated = {row.row: row for row in engine.generate([replace(request, version=version) for request in requests])}
    rows = (generated[request.row] for request in requests)
    return [GeneratedRow(row.tokens.tolist(), row.logprobs.tolist()) for row in rows]


def main() -> int:
    end_with_parent()
    text, result = sys.argv[1:]
    jobs, results = decode(list[EngineJob], text), []
    for number, job in enumerate(jobs):
        print(f"engine {number + 1} of {len(jobs)}: {job}", flush=True)
        results.append(measure_engine(job))
    Path(result).write_text(encode(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
