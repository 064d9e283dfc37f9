"""Memory that the ranks of real gangs take, beside the formula of `stageline check` and the trace of `--trace`.

A Llama of 63 M parameters as policy, critic and reference, with Megatron's own linears as on a GPU
(`model.kernels=portable`); micro-batches of four rows of 128 tokens. Each rank is a process: first update, log-probs,
values, publication, checkpoints, another update of two micro-batches (of a pipeline: as many as stages), publication,
checkpoints. Its peak is the largest resident set of these phases, as Linux counts it (VmHWM, set back before each).

    base        the peak of a rank of `random:tiny` on as many ranks in the same dtype, less its own formula
    formula     for a CPU: state, activations, logits, copies for checkpoints; or the publication, if it takes more
    trace       most bytes of a phase on the GPU that is not there and on its host, with blocks of logits as large as a
                CPU's; and the formula's copies for checkpoints, since the trace's are pinned and rounded up

The peak is measured twice: with a heap that returns what was freed, so that the resident set is what is in use, and
with the heap of Stageline's workers (`worker_process.FORKSERVER_ENVIRONMENT`), which keeps it. The second has holes.
The first rank of each pipeline stage is compared; the table shows the one that differs most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import arguments, environment, measured_load, report, write_json
from pipeline.workers.worker_process import FORKSERVER_ENVIRONMENT
from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.fake_gpu import DEVICE, HOST
from stages.models.hf_weights import write_tensors
from stages.models.host import MegatronHost
from stages.models.memory import (
    LOGITS_BLOCK_BYTES,
    GangModels,
    RowsSize,
    checkpoint_bytes,
    publication_bytes,
    rank_bytes,
    state_bytes,
)
from stages.models.protocol import MODEL_ROLES, CriticBatch, PolicyBatch, Rank, Role
from stages.models.spec import RANDOM_8B, RANDOM_TINY, read_config, read_spec, tensor_shapes
from stages.models.trace import TraceBatch, TracedGang, TracedRank, rows_of, trace_stage, worst_batch
from stages.ppo.config import PPOConfig
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values

SIZES = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 256,
    "rope_scaling": None, "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS, PROMPT, NEW = 512, 1, 127
RETURNED = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc's settings with which memory that is freed goes back to the system."""
KEPT = {name: value for name, value in FORKSERVER_ENVIRONMENT.items() if name.startswith("MALLOC_")}
"""glibc's settings in Stageline's workers."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
HEAPS = {"returned": RETURNED, "kept": KEPT}


@dataclass(frozen=True)
class Case:
    ranks: int = 1
    dtype: Any = "float32"
    layout: Mapping[str, Any] = field(default_factory=dict)
    lora_rank: int = 0

    def gang(self, path: str, tokens: int) -> TracedGang:
        optimizer = OptimizerConfig(micro_batch_tokens=tokens)
        model = ModelConfig(
            path=path, dtype=self.dtype, policy=optimizer, critic=optimizer, kernels="portable",
            lora=LoraConfig(rank=self.lora_rank), products="torch", peak_tflops=1.0,
        )  # fmt: skip
        ppo, new = PPOConfig(epochs=1, minibatches=1), min(NEW, tokens - PROMPT)
        sampling, layout = SamplingConfig(max_new_tokens=new), LayoutConfig(**self.layout)
        return TracedGang(model, sampling, ppo, layout, MODEL_ROLES, self.ranks, PROMPT)


CASES = {
    "one rank": Case(),
    "one rank, bfloat16": Case(dtype="bfloat16"),
    "one rank, LoRA of rank 16": Case(lora_rank=16),
    "tensor 2": Case(2, layout={"tensor": 2, "sequence_parallel": True}),
    "pipeline 2": Case(2, layout={"pipeline": 2}),
    "data 2": Case(2),
    "data 2, ZeRO-1": Case(2, layout={"distributed_optimizer": True}),
    "data 2, ZeRO-1, bfloat16": Case(2, "bfloat16", {"distributed_optimizer": True}),
}


def write_random(directory: Path, sizes: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write a random model of `SIZES`, some of which `sizes` replaces."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(read_config(RANDOM_8B) | SIZES | dict(sizes)))
    shapes = tensor_shapes(read_spec(str(directory)))
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape) for name, shape in shapes.items()
    }
    write_tensors(directory / "model.safetensors", weights)


# ---- measured --------------------------------------------------------------------------------------------


def measure(gang: TracedGang, heap: Mapping[str, str]) -> list[int]:
    """Run all ranks of a gang and return the peak bytes of each."""
    with tempfile.TemporaryDirectory(prefix="stageline-memory-") as folder, environment({**heap, **ONE_THREAD}):
        return [int(peak) for peak in run_ranks(_rank, gang.num_ranks, gang, folder)]


def run_ranks(rank_main: Callable[..., None], num_ranks: int, *arguments: Any) -> list[Any]:
    """Run all ranks of a gang, each in a process of its own, and return their answers in the order of the ranks. A rank
    is `rank_main(*arguments, index, answer)`, and sends its answer into the pipe `answer`."""
    spawn = multiprocessing.get_context("spawn")
    answers = [spawn.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [spawn.Process(target=rank_main, args=(*arguments, i, own)) for i, (_, own) in enumerate(answers)]
    for rank in ranks:
        rank.start()
    for _, own in answers:
        own.close()
    found = [answer.recv() for answer, _ in answers]
    for rank in ranks:
        rank.join()
    return found


def reset_peak() -> None:
    """Set the peak of this process's resident set (VmHWM) back to its present size."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """Return a number of bytes from Linux's status of this process: `VmHWM`, say."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _rank(gang: TracedGang, folder: str, index: int, answer: Any) -> None:
    torch.set_num_threads(1)
    peaks: list[int] = []

    @contextmanager
    def phase() -> Iterator[None]:
        reset_peak()
        yield
        peaks.append(status_bytes("VmHWM"))

    rank = Rank(index, gang.num_ranks, f"file://{folder}/rendezvous", 1)
    with phase():
        host = MegatronHost(gang.model, gang.sampling, gang.ppo, gang.layout, gang.roles, rank, seed=0, total_steps=2)
    for step in range(2):
        for role, forward in (
            (Role.REFERENCE, host.ref_logprobs),
            (Role.POLICY, host.policy_logprobs),
            (Role.CRITIC, host.values),
        ):
            with phase():
                forward(rows_of(worst_batch(gang, role) if step else TraceBatch(1, 2, 1), gang.data_ranks))
        for role in (Role.CRITIC, Role.POLICY):
            batch, number = (worst_batch(gang, role), gang.num_batches) if step else (TraceBatch(1, 2, 1), 1)
            with phase():
                _update(host, role, step, rows_of(batch, gang.data_ranks * number))
        with phase():
            for _ in host.published_blocks():
                pass
        for role in (Role.CRITIC, Role.POLICY):
            directory = Path(folder, f"{role}-{step}")
            directory.mkdir(exist_ok=True)
            dist.barrier()
            with phase():
                host.save(role, directory)()
    answer.send(max(peaks))
    dist.barrier()
    host.close()


def _update(host: MegatronHost, role: Role, step: int, rollout: Rollout) -> None:
    zeros = np.zeros(rollout.tokens.shape, np.float32)
    advantages = Advantages(zeros, rollout.response_mask.astype(np.float32), zeros, rollout.response_mask)
    if role is Role.POLICY:
        known = PolicyLogprobs(zeros, zeros), ReferenceLogprobs(zeros)
        host.update_policy(step, PolicyBatch(rollout, advantages, *known, kl_coef=0.0))
    else:
        host.update_critic(
            step, CriticBatch(rollout, advantages, Values(zeros, np.zeros(rollout.num_rows, np.float32)))
        )
    host.mark_clean(role)


# ---- predicted -------------------------------------------------------------------------------------------


def by_formula(gang: TracedGang, stage: int) -> tuple[int, int]:
    """Return (most bytes of the first rank of a stage, its copies for checkpoints, which are among them)."""
    spec, layout = read_spec(gang.model.path), gang.layout
    models = GangModels(spec, gang.model, layout, gang.roles, gang.data_ranks, portable=True)
    sizes = {role: worst_batch(gang, role).size for role in (Role.POLICY, Role.CRITIC)}
    step = sum(rank_bytes(models, sizes, stage, rows=RowsSize(0, 0, 0), device="cpu").values())
    publication = sum(publication_bytes(models, stage, on_gpu=False))
    copies = checkpoint_bytes(models, stage, is_pinned=False)
    return max(step, sum(state_bytes(models, stage).values()) + publication) + copies, copies


def by_trace(gang: TracedGang) -> list[int]:
    """Return the most bytes of a phase of the first rank of each stage, without the copies for checkpoints."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        ranks = [process.submit(_traced, gang, stage).result() for stage in range(gang.layout.pipeline)]
    return [max(phase.peak.get(DEVICE, 0) + phase.peak.get(HOST, 0) for phase in rank.phases) for rank in ranks]


def _traced(gang: TracedGang, stage: int) -> TracedRank:
    LOGITS_BLOCK_BYTES["cuda"] = LOGITS_BLOCK_BYTES["cpu"]
    return trace_stage(gang, stage)


def compare(case: Case, path: str, bases: Mapping[str, int], heaps: Sequence[str]) -> dict[str, float]:
    """Return the bytes of the rank that differs most from the formula."""
    gang = case.gang(path, TOKENS)
    peaks = {heap: measure(gang, HEAPS[heap]) for heap in heaps}
    traces, found = by_trace(gang), []
    for stage in range(gang.layout.pipeline):
        formula, copies = by_formula(gang, stage)
        index = stage * gang.num_ranks // gang.layout.pipeline
        measured = {heap: float(peaks[heap][index] - bases[heap]) for heap in heaps}
        found.append({"formula_bytes": float(formula), "trace_bytes": float(traces[stage] + copies)} | measured)
    return max(found, key=lambda one: abs(one["formula_bytes"] / one[heaps[0]] - 1))


def base_of(case: Case, heap: str) -> int:
    """Return the peak of a process that holds no model of any size."""
    gang = replace(case, layout={}, lora_rank=0).gang(RANDOM_TINY, 8)
    return measure(gang, HEAPS[heap])[0] - by_formula(gang, 0)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES], help="these runs")
    parser.add_argument("--heaps", nargs="+", choices=[*HEAPS], default=[*HEAPS], help="the first one is compared")


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    cases = {"one rank": Case()} if options.quick else {name: CASES[name] for name in options.only}
    figures: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="stageline-predicted-") as temporary, measured_load() as load:
        path, known = (RANDOM_TINY if options.quick else f"{temporary}/model"), dict[tuple[int, str, str], int]()
        if not options.quick:
            write_random(Path(path))
        for name, case in cases.items():
            for heap in options.heaps:
                if (case.ranks, case.dtype, heap) not in known:
                    known[case.ranks, case.dtype, heap] = base_of(case, heap)
            bases = {heap: known[case.ranks, case.dtype, heap] for heap in options.heaps}
            found = compare(case, path, bases, options.heaps)
            figures |= {f"{name}/{key}": value for key, value in found.items()}
            figures |= {f"{name}/base, {heap}": float(base) for heap, base in bases.items()}
            measured = found[options.heaps[0]]
            predicted = found["formula_bytes"], found["trace_bytes"]
            megabytes = (*bases.values(), *(found[heap] for heap in options.heaps), *predicted)
            differences = [f"{number / measured - 1:+.1%}" for number in predicted]
            rows.append((name, *(f"{number / 2**20:,.0f}" for number in megabytes), *differences))
            print(*rows[-1], flush=True)
            if options.json:
                write_json(options.json, figures)
    figures["others_load"] = load().others
    heads = [*(f"base, {heap}" for heap in options.heaps), *(f"measured, {heap}" for heap in options.heaps)]
    columns = ("run", *heads, "formula", "trace", "formula / measured - 1", "trace / measured - 1")
    report("peak memory of a rank, MiB", columns, rows, [f"others' load {figures['others_load']:.0%}"])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
