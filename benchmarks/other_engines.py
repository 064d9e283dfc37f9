"""vLLM as sides of `benchmarks.generation --engines embedded,vllm`:

vLLM, its own draws     in a process of its own, as a program that uses it would have it: its sampler, no log-probs
vLLM, our draws         likewise, stepped by the adapter of Stageline's server: keyed noise, log-probs
engine.kind=vllm        the same behind the boundary, as a run has it: what it costs more is the boundary's
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.engines.build import build_engine
from stages.engines.config import EngineConfig, VllmConfig
from stages.engines.protocol import GenerationEngine, Request
from stages.engines.remote.process import ENVIRONMENTS, LAST_LINES, environment_problem
from stages.models.config import SamplingConfig

ROOT = Path(__file__).resolve().parents[1]
OWN, KEYED, BOUNDARY = "vLLM, its own draws", "vLLM, our draws", "engine.kind=vllm"
KV_BUDGET_MB = 512


@dataclass(frozen=True)
class Row:
    """A prompt, and how many tokens to make."""

    tokens: Sequence[int]
    new: int


Side = Callable[[Sequence[Row], bool], object]
"""Makes all tokens of the rows, sampled or greedy."""


def vllm_python() -> str:
    """Return the interpreter of vLLM's environment. `make engine-vllm` makes it if it is not there."""
    python = os.environ.get("STAGELINE_VLLM_PYTHON", str(ROOT / ".engines/vllm/bin/python"))
    if environment_problem(python, ENVIRONMENTS["vllm"]) is not None:
        print("making vLLM's environment: some minutes, once", file=sys.stderr, flush=True)
        subprocess.run(["make", "engine-vllm"], cwd=ROOT, check=True)
        python = str(ROOT / ".engines/vllm/bin/python")
    return python


@contextmanager
def vllm_sides(path: Path, dtype: str, *, max_rows: int, max_seq: int, threads: int) -> Iterator[dict[str, Side]]:
    """Yield the three sides by name. All of them are up and wait."""
    python, own = vllm_python(), VllmConfig()
    job = {
        "model": str(path.resolve()),
        "dtype": dtype,
        "max_seq": max_seq,
        "max_rows": max_rows,
        "threads": threads,
        "kv_budget_mb": KV_BUDGET_MB,
        "eager": not own.compile,
        "stageline": str(ROOT),
    }
    config = EngineConfig(kind="vllm", python=python, dtype=dtype, max_rows=max_rows, kv_budget_mb=KV_BUDGET_MB)  # type: ignore[arg-type]
    with ExitStack() as stack:
        sides: dict[str, Side] = {
            name: stack.enter_context(vllm_process(python, {**job, "draws": draws}))
            for name, draws in ((OWN, "own"), (KEYED, "keyed"))
        }
        engine = stack.enter_context(closing(build_engine(str(path), config, max_seq=max_seq, threads=threads)))
        yield {**sides, BOUNDARY: lambda rows, sampled: run_rows(engine, rows, sampled)}


def run_rows(engine: GenerationEngine, rows: Sequence[Row], sampled: bool) -> list[list[int]]:
    """Return the rows' new tokens."""
    requests = [
        Request(i, 1, 1, tuple(row.tokens), 0, SamplingConfig(row.new, row.new, temperature=float(sampled)))
        for i, row in enumerate(rows)
    ]
    made = {completion.row: completion.tokens.tolist() for completion in engine.generate(requests)}
    return [made[i] for i in range(len(rows))]


@contextmanager
def vllm_process(python: str, job: dict[str, Any]) -> Iterator[Side]:
    """Yield a vLLM that makes rows in its own process. Raises RuntimeError, with its last lines, if it ends."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        stream.write(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "PYTHONPATH": ""}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [python, str(ROOT / "benchmarks/peers/vllm_generate.py"), f"/dev/fd/{read}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            pass_fds=[read],
            env=environment,
            text=True,
        )
        os.close(read)
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def answer() -> dict[str, Any]:
            line = answers.readline()
            if not line:
                status = process.wait()
                said.seek(0)
                last = "".join(deque(said, LAST_LINES))
                raise RuntimeError(f"vLLM's process ended with {status}; it said last:\n{last}")
            found: dict[str, Any] = json.loads(line)
            return found

        def generate(rows: Sequence[Row], sampled: bool) -> None:
            given = [{"tokens": list(row.tokens), "new": row.new, "temperature": float(sampled)} for row in rows]
            with suppress(BrokenPipeError):  # then there is no answer, which says why
                print(json.dumps({"rows": given}), file=ask, flush=True)
            made, wanted = answer()["tokens"], sum(row.new for row in rows)
            assert made == wanted, f"vLLM made {made} tokens instead of {wanted}"

        try:
            answer()
            yield generate
        finally:
            with suppress(BrokenPipeError):
                ask.close()
            process.terminate()
            process.wait()
