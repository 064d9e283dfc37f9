"""The memory of training and the savings of each option, in four tables.

Recomputation: bytes that a micro-batch's blocks keep for the backward pass, and seconds of a policy update, by
`layout.recompute` and `recompute_modules`.

SmolLM2-135M, all blocks trained, 16 rows x (32 + 32) tokens, one epoch, one minibatch, two micro-batches; arms are
taken in turn in every repeat, each with a model of its own. Kept bytes are counted as autograd saves tensors, each
memory once, and beside them stands what `stages.models.memory` predicts. The update's seconds have the output layer in
them, which nothing recomputes here. CPU seconds of all threads stand beside those of the clock: they tell the arms
apart on a machine that others use, too.

The loss: the most bytes allocated at a time by log-probs and their backward pass, as torch's profiler counts them, a
block of the vocabulary at a time with the output layer's gradient added up, against logits that exist whole
(`F.linear`, `log_softmax`, `gather`, as a plain implementation has it) with a frozen output layer and no entropy, which
favours that side.

State: bytes of the policy's weights, gradients, masters and moments for each parameter, after an update, by
`gradients_dtype` and `moments_dtype`; and the CPU seconds of a second update of the same rows.

LoRA: bytes of the policy's optimizer state (masters and moments) after an update, with adapters against every
parameter.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.harness import arguments, measured_load, report, write_json
from stages.models.build import output_weight
from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.forward import cut_micro_batches, hidden_states
from stages.models.host import MegatronHost
from stages.models.memory import GangModels, MicroBatchSize, kept_bytes, state_bytes, trained_parameters
from stages.models.offload import storages
from stages.models.protocol import PolicyBatch, Rank, Role
from stages.models.spec import RANDOM_TINY, read_spec
from stages.models.token_logprobs import token_logprobs
from stages.ppo.config import PPOConfig
from storage.records import Advantages, ReferenceLogprobs, Rollout

MODEL = Path("assets/smollm2-135m-instruct")
ROWS, PROMPT, NEW, MICRO_ROWS = 16, 32, 32, 8
WARM_UP = 1
SAMPLED = (256, 1024, 2048)
"""Tokens of a micro-batch that go through the output layer."""
LORA_RANK = 16
ROLES = frozenset({Role.POLICY, Role.REFERENCE})
FLOAT32: Any = {"gradients_dtype": "float32", "moments_dtype": "float32"}
STATES: tuple[tuple[Literal["float32", "bfloat16"], dict[str, Any], int], ...] = (
    ("float32", FLOAT32, 0),
    ("float32", FLOAT32 | {"moments_dtype": "bfloat16"}, 0),
    ("bfloat16", FLOAT32, 0),
    ("bfloat16", FLOAT32 | {"gradients_dtype": "bfloat16"}, 0),
    ("bfloat16", FLOAT32 | {"moments_dtype": "bfloat16"}, 0),
    ("bfloat16", {"gradients_dtype": "bfloat16", "moments_dtype": "bfloat16"}, 0),
    ("bfloat16", {"optimizer": "adafactor"}, 0),
    ("bfloat16", {"optimizer": "muon"}, 0),
    ("bfloat16", FLOAT32, LORA_RANK),
)
"""Dtype of the weights, settings of the optimizer, and rank of the adapters."""
ARMS = {
    "none": LayoutConfig(),
    "core_attn": LayoutConfig(recompute="selective"),
    "mlp": LayoutConfig(recompute="selective", recompute_modules=["mlp"]),
    "full": LayoutConfig(recompute="full"),
}


def batch_of(vocabulary: int, step: int) -> PolicyBatch:
    """Return random tokens and advantages in full rows."""
    rng = np.random.default_rng(step)
    shape = ROWS, PROMPT + NEW
    mask = np.broadcast_to(np.arange(PROMPT + NEW) >= PROMPT, shape)
    zeros, ones = np.zeros(shape, np.float32), np.ones(ROWS, np.int32)
    rollout = Rollout(
        row=np.arange(ROWS),
        prompt_index=np.arange(ROWS),
        tokens=rng.integers(3, vocabulary, shape).astype(np.int32),
        prompt_lengths=PROMPT * ones,
        response_lengths=NEW * ones,
        response_mask=mask,
        sampler_logprobs=zeros,
        token_versions=np.where(mask, step, -1).astype(np.int32),
        finish_reason=np.zeros(ROWS, np.int8),
    )
    advantages = np.where(mask, rng.normal(size=shape), 0).astype(np.float32)
    made = Advantages(advantages, advantages, advantages, mask)
    return PolicyBatch(rollout, made, None, ReferenceLogprobs(zeros), 0.0)


def measured_bytes(host: MegatronHost, batch: PolicyBatch) -> int:
    """Return the bytes that the forward pass of one micro-batch keeps, up to the hidden states."""
    trainer = host._trainers[Role.POLICY]
    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rollout = batch.rollout
    rows = np.arange(MICRO_ROWS)
    device = host._parallel_rank.device
    (micro,) = cut_micro_batches(rollout.tokens, rollout.response_mask, rows, device, max_tokens=1 << 20)
    trainer._ddp.train()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        hidden = hidden_states(trainer._ddp, None, micro)
    found = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del hidden
    return found


def opened(
    model: ModelConfig,
    layout: LayoutConfig,
    threads: int,
    steps: int,
    folder: Path,
    roles: frozenset[Role] = ROLES,
) -> MegatronHost:
    ppo = PPOConfig(epochs=1, minibatches=1, proximal="sampler")
    rank = Rank(0, 1, f"file://{folder}/{time.monotonic_ns()}", threads)
    return MegatronHost(model, SamplingConfig(), ppo, layout, roles, rank, seed=0, total_steps=steps)


def measure(
    arm: LayoutConfig, model: ModelConfig, threads: int, updates: int, folder: Path
) -> tuple[int, list[tuple[float, float]]]:
    """Return (bytes kept, (seconds, CPU seconds) of each update after the first)."""
    vocabulary, seconds = read_spec(model.path).vocab_size, []
    host = opened(model, arm, threads, updates + WARM_UP, folder)
    found = measured_bytes(host, batch_of(vocabulary, 0))
    for step in range(updates + WARM_UP):
        batch, started, began = batch_of(vocabulary, step), time.perf_counter(), time.process_time()
        host.update_policy(step, batch)
        host.mark_clean(Role.POLICY)
        seconds.append((time.perf_counter() - started, time.process_time() - began))
    host.close()
    return found, seconds[WARM_UP:]


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that `work` has allocated at a time, as torch's profiler counts them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(number for _, number in changes))


def loss_bytes(host: MegatronHost, sampled: int) -> tuple[int, int]:
    """Return the bytes of log-probs of `sampled` tokens, forward and backward: by blocks of the vocabulary, and with
    whole logits."""
    weight_VH = output_weight(host._trainers[Role.POLICY].model, None)
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(sampled, weight_VH.shape[1], generator=generator).requires_grad_()
    tokens_N = torch.randint(weight_VH.shape[0], (sampled,), generator=generator)
    products, kernels = host.product_choice.products, host._kernels
    index_N = torch.zeros_like(tokens_N)

    def by_blocks() -> None:
        logprobs_N, _ = token_logprobs(
            hidden_NH, weight_VH, tokens_N, index_N, host._distribution, products, kernels, entropy="value"
        )
        logprobs_N.sum().backward()

    def whole() -> None:
        logits_NV = F.linear(hidden_NH.to(weight_VH.dtype), weight_VH.detach()).float()
        logits_NV.log_softmax(1).gather(1, tokens_N[:, None]).sum().backward()

    found = []
    for work in (by_blocks, whole):
        work()  # hidden_NH has a gradient then, and libraries what they keep
        found.append(peak_bytes(work))
    return found[0], found[1]


def optimizer_bytes(model: ModelConfig, threads: int, folder: Path) -> int:
    """Return the bytes of the policy's masters and moments after an update."""
    host = opened(model, LayoutConfig(), threads, 1, folder)
    host.update_policy(0, batch_of(read_spec(model.path).vocab_size, 0))
    found = sum(storage.nbytes() for storage in storages(host._trainers[Role.POLICY]._beside_weights()))
    host.close()
    return found


def state_of(model: ModelConfig, threads: int, folder: Path) -> tuple[int, int, float]:
    """Return the bytes of the policy's state, measured and predicted, and the CPU seconds of its second update."""
    host = opened(model, LayoutConfig(), threads, 2, folder, frozenset({Role.POLICY}))
    seconds = 0.0
    for step in range(2):
        batch, began = batch_of(read_spec(model.path).vocab_size, step), time.process_time()
        host.update_policy(step, batch)
        host.mark_clean(Role.POLICY)
        seconds = time.process_time() - began
    measured = sum(host.state_bytes().values())
    host.close()
    return measured, sum(state_bytes(policy_of(model), 0).values()), seconds


def policy_of(model: ModelConfig) -> GangModels:
    return GangModels(read_spec(model.path), model, LayoutConfig(), frozenset({Role.POLICY}), 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--updates", type=int, default=3, help="measured in each repeat, after one")


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    repeats, updates = (1, 1) if options.quick else (options.repeats, options.updates)
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    optimizer = OptimizerConfig(micro_batch_rows=MICRO_ROWS)
    kept: dict[tuple[str, str], int] = {}
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    base = ModelConfig(path=RANDOM_TINY if options.quick else str(MODEL), policy=optimizer, critic=optimizer)
    with tempfile.TemporaryDirectory(prefix="stageline-memory-") as folder, measured_load() as load:
        for _ in range(repeats):
            for dtype in options.dtypes:
                for name, arm in ARMS.items():
                    model = replace(base, dtype=dtype)
                    kept[dtype, name], found = measure(arm, model, options.threads, updates, Path(folder))
                    seconds.setdefault((dtype, name), []).extend(found)
    figures: dict[str, float] = {"others_load": load().others}
    report_recomputation(options.threads, base, kept, seconds, figures)
    with tempfile.TemporaryDirectory(prefix="stageline-memory-") as folder:
        report_loss([64] if options.quick else SAMPLED, base, options, Path(folder), figures)
        report_state(base, options, Path(folder), figures)
        report_adapters(base, options, Path(folder), figures)
    write_json(options.json, figures)


def report_recomputation(
    threads: int,
    base: ModelConfig,
    kept: Mapping[tuple[str, str], int],
    seconds: Mapping[tuple[str, str], list[tuple[float, float]]],
    figures: dict[str, float],
) -> None:
    rows = []
    size = MicroBatchSize(MICRO_ROWS * (PROMPT + NEW), MICRO_ROWS * NEW, PROMPT + NEW)
    for (dtype, name), found in seconds.items():
        config = replace(base, dtype=dtype)  # type: ignore[arg-type]
        gang = GangModels(read_spec(base.path), config, ARMS[name], ROLES, 1)
        predicted = kept_bytes(gang, Role.POLICY, size, 0)
        clock, cpu = (statistics.median(times) for times in zip(*found, strict=True))
        _, cpu_of_none = (statistics.median(times) for times in zip(*seconds[dtype, "none"], strict=True))
        rows.append(
            (
                f"{dtype}, {name}",
                f"{kept[dtype, name] / 2**20:.1f}",
                f"{predicted / 2**20:.1f}",
                f"{kept[dtype, name] / kept[dtype, 'none']:.0%}",
                f"{clock:.2f}",
                f"{cpu:.2f}",
                f"{cpu / cpu_of_none:.2f}",
            )
        )
        figures[f"{dtype}/{name}/kept_bytes"] = kept[dtype, name]
        figures[f"{dtype}/{name}/predicted_bytes"] = predicted
        figures[f"{dtype}/{name}/update_s"] = clock
        figures[f"{dtype}/{name}/update_cpu_s"] = cpu
    title = f"recomputation, {ROWS} x ({PROMPT} + {NEW}) tokens, {threads} threads"
    columns = ("arm", "kept, MiB", "predicted", "of none", "s/update", "CPU s", "x none")
    report(title, columns, rows, [f"others' load {figures['others_load']:.0%}"])


def report_loss(
    sampled: Sequence[int], base: ModelConfig, options: argparse.Namespace, folder: Path, figures: dict[str, float]
) -> None:
    rows = []
    for dtype in options.dtypes:
        host = opened(replace(base, dtype=dtype), LayoutConfig(), options.threads, 1, folder)
        for number in sampled:
            blocks, whole = loss_bytes(host, number)
            cells = (f"{blocks / 2**20:.0f}", f"{whole / 2**20:.0f}", f"{blocks / whole - 1:+.0%}")
            rows.append((f"{dtype}, {number} tokens", *cells))
            figures[f"{dtype}/loss/{number}/blocks_bytes"] = blocks
            figures[f"{dtype}/loss/{number}/whole_bytes"] = whole
        host.close()
    title = f"peak of the loss, vocabulary {read_spec(base.path).vocab_size}"
    report(title, ("sampled tokens", "by blocks, MiB", "whole logits, MiB", "change"), rows, [])


def report_state(base: ModelConfig, options: argparse.Namespace, folder: Path, figures: dict[str, float]) -> None:
    rows = []
    for dtype, settings, rank in STATES:
        model = replace(base, dtype=dtype, policy=replace(base.policy, **settings), lora=LoraConfig(rank=rank))
        measured, predicted, seconds = state_of(model, options.threads, folder)
        number = trained_parameters(policy_of(replace(model, lora=LoraConfig())), Role.POLICY, 0).of_dtype
        optimizer = ", ".join([str(settings.get("optimizer", "adamw")), *[f"LoRA of rank {rank}"] * bool(rank)])
        dtypes = [str(settings.get(name, "")) for name in FLOAT32]
        cells = (f"{predicted / number:.2f}", f"{measured / number:.2f}", f"{seconds:.2f}")
        rows.append((optimizer, dtype, *dtypes, *cells))
        name = "/".join(["state", optimizer, dtype, *filter(None, dtypes)])
        figures[f"{name}/predicted_bytes"] = predicted
        figures[f"{name}/measured_bytes"] = measured
        figures[f"{name}/update_cpu_s"] = seconds
    columns = ("optimizer", "weights", "gradients", "moments", "predicted", "measured", "CPU s/update")
    report("bytes of the policy's state for each parameter of the model", columns, rows, [])


def report_adapters(base: ModelConfig, options: argparse.Namespace, folder: Path, figures: dict[str, float]) -> None:
    rows = []
    for dtype in options.dtypes:
        found = {}
        for name, lora in {"all": LoraConfig(), "lora": LoraConfig(rank=LORA_RANK)}.items():
            model = replace(base, dtype=dtype, lora=lora)
            found[name] = figures[f"{dtype}/{name}/optimizer_bytes"] = optimizer_bytes(model, options.threads, folder)
            state = state_bytes(policy_of(model), 0)
            figures[f"{dtype}/{name}/predicted_optimizer_bytes"] = state["float32 masters"] + state["moments"]
        cells = (
            f"{found['all'] / 2**20:.1f}",
            f"{found['lora'] / 2**20:.1f}",
            f"{found['lora'] / found['all'] - 1:+.1%}",
        )
        rows.append((dtype, *cells))
    title = f"optimizer state of the policy, LoRA of rank {LORA_RANK} on all linears"
    report(title, ("", "all parameters, MiB", "LoRA, MiB", "change"), rows, [])


if __name__ == "__main__":
    main()
