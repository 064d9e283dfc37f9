"""vLLM in one process, as a program of its own would use it, in an environment of its own.

    python vllm_generate.py JOB.json        one JSON line for each line {"rows": [...]} that it reads: {"seconds": ...}

`draws: own` is vLLM as it comes, with its own sampler and no log-probs; `draws: keyed` steps the adapter that
Stageline's server has, in this process: the same draws without the boundary. Files of Stageline's environment are not
needed for the former.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""tokens, new (how many to make), temperature."""


def own_draws(job: dict[str, Any]) -> Callable[[list[Row]], int]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415 (an environment's own, of one of two modes)

    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        max_model_len=job["max_seq"],
        max_num_seqs=job["max_rows"],
        enforce_eager=job["eager"],
        generation_config="vllm",
        kv_cache_memory_bytes=job["kv_budget_mb"] << 20,
    )

    def generate(rows: list[Row]) -> int:
        prompts = [{"prompt_token_ids": row["tokens"]} for row in rows]
        settings = [
            SamplingParams(temperature=row["temperature"], max_tokens=row["new"], ignore_eos=True, detokenize=False)
            for row in rows
        ]
        return sum(len(done.outputs[0].token_ids) for done in llm.generate(prompts, settings, use_tqdm=False))

    return generate


def keyed_draws(job: dict[str, Any]) -> Callable[[list[Row]], int]:
    sys.path.insert(0, job["stageline"])
    from stages.engines.remote.serving.adapter import ServedRow, Settings  # noqa: PLC0415
    from stages.engines.remote.serving.vllm_adapter import VllmAdapter  # noqa: PLC0415

    adapter = VllmAdapter(
        Settings(
            model=job["model"],
            dtype=job["dtype"],
            max_seq=job["max_seq"],
            max_rows=job["max_rows"],
            kv_budget_mb=job["kv_budget_mb"],
            tensor_parallel=1,
            pipeline_parallel=1,
            threads=job["threads"],
            extra={"compile": not job["eager"], "prefix_caching": False, "sleeps": False},
        )
    )

    def generate(rows: list[Row]) -> int:
        for number, row in enumerate(rows):
            new = row["new"]
            adapter.add(ServedRow(number, number, 1, 1, tuple(row["tokens"]), new, new, row["temperature"], (), (), ()))
        made = finished = 0
        while finished < len(rows):
            for done in adapter.step():
                made, finished = made + len(done.tokens), finished + 1
        return made

    return generate


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf8"))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints as it likes
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    generate = {"own": own_draws, "keyed": keyed_draws}[job["draws"]](job)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = generate(json.loads(line)["rows"])
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
