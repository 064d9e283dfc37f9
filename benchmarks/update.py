"""Seconds of the trainer's part of a PPO step, ours against a bare loop of transformers and torch on the same tokens:
forward, losses, backward, clip, AdamW, of policy and critic. Both in this process, in turn, with the same threads.

The bare loop computes the same losses by the same functions; its models are transformers' with torch's own attention,
its log-probs come from whole logits of the whole rows, its optimizer is torch's fused AdamW with float32 masters under
bfloat16 as ours. What is possible: the products of both updates at the best rate of any library in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import arguments, measured_load, report, write_json
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.flops import matrix_numbers
from stages.models.host import MegatronHost
from stages.models.numerics import Products, input_gradient, multiply, weight_gradient
from stages.models.protocol import CriticBatch, PolicyBatch, Rank, Role
from stages.models.spec import ModelSpec, layer_shapes, read_spec
from stages.ppo.config import PPOConfig
from storage.records import Advantages, ReferenceLogprobs, Rollout, Values

ROOT = Path(__file__).resolve().parents[1]
MODEL = str(ROOT / "assets/smollm2-135m-instruct")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LR = 1e-5
SHAPES = {"even": (32, 32), "uneven": (16, 48)}
"""Tokens of prompts and, at most, of responses: all as long, or of 4 tokens to the most."""


def rollout_of(shape: str, rows: int, vocab_size: int) -> Rollout:
    prompt, most = SHAPES[shape]
    rng = np.random.default_rng(0)
    lengths = np.full(rows, most) if shape == "even" else rng.integers(4, most + 1, rows)
    index = np.arange(prompt + most)
    mask = (index >= prompt) & (index < prompt + lengths[:, None])
    return Rollout(
        row=np.arange(rows),
        prompt_index=np.arange(rows),
        tokens=np.where(index < prompt + lengths[:, None], rng.integers(20, vocab_size, mask.shape), 0).astype(
            np.int32
        ),
        prompt_lengths=np.full(rows, prompt, np.int32),
        response_lengths=lengths.astype(np.int32),
        response_mask=mask,
        sampler_logprobs=np.where(mask, -10.0, 0).astype(np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.zeros(rows, np.int8),
    )


class Bare:
    """Owns a model with a head, its float32 masters and its optimizer: what one writes in an afternoon."""

    def __init__(self, dtype: torch.dtype, *, critic: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
        self.head = torch.nn.Parameter(torch.zeros(self.model.config.hidden_size)) if critic else None
        self.parameters = [*(self.model.model if critic else self.model).parameters()]
        if self.head is not None:
            self.parameters.append(self.head)
        self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, betas=(0.9, 0.95), eps=1e-5, fused=True)

    def update(self, tokens: torch.Tensor, mask: torch.Tensor, attention: torch.Tensor, target: torch.Tensor) -> None:
        """Make a step of clipped PPO, or of the squared error of values, against a fixed target."""
        weight = mask[:, 1:].float() / mask.sum()
        if self.head is None:
            logits = self.model(tokens, attention_mask=attention).logits[:, :-1].float()
            logp = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
            ratio = (logp - logp.detach()).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -(weight * torch.minimum(ratio * target[:, 1:], clipped * target[:, 1:])).sum()
        else:
            hidden = self.model.model(tokens, attention_mask=attention).last_hidden_state[:, :-1].float()
            loss = (weight * (hidden @ self.head - target[:, 1:]).square()).sum() / 2
        loss.backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        self.optimizer.zero_grad()


@contextmanager
def arms(dtype: str, shape: str, rows: int, threads: int, scratch: Path) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield one update of policy and critic by either side."""
    spec = read_spec(MODEL)
    rollout = rollout_of(shape, rows, spec.vocab_size)
    mask = rollout.response_mask
    noise = np.where(mask, np.random.default_rng(1).normal(size=mask.shape), 0).astype(np.float32)
    zeros = np.zeros_like(noise)
    optimizer = OptimizerConfig(lr=LR, decay="constant", micro_batch_tokens=1024)
    host = MegatronHost(
        ModelConfig(path=MODEL, dtype=dtype, policy=optimizer, critic=optimizer),  # type: ignore[arg-type]
        SamplingConfig(max_new_tokens=SHAPES[shape][1]),
        PPOConfig(epochs=1, minibatches=1, proximal="loglinear"),
        LayoutConfig(),
        frozenset({Role.POLICY, Role.CRITIC}),
        Rank(0, 1, f"file://{scratch}/{dtype}-{shape}", threads),
        seed=0,
        total_steps=1000,
    )
    advantages = Advantages(noise, noise, noise, mask)
    policy = PolicyBatch(rollout, advantages, None, ReferenceLogprobs(zeros), 0.0)
    critic = CriticBatch(rollout, advantages, Values(zeros, np.zeros(rows, np.float32)))
    steps = iter(range(1000))

    def ours() -> None:
        step = next(steps)
        host.update_policy(step, policy)
        host.mark_clean(Role.POLICY)
        host.update_critic(step, critic)
        host.mark_clean(Role.CRITIC)

    models = [Bare(DTYPES[dtype], critic=role) for role in (False, True)]
    tokens, masked, target = torch.from_numpy(rollout.tokens).long(), torch.from_numpy(mask), torch.from_numpy(noise)
    attention = (
        torch.arange(mask.shape[1]) < torch.from_numpy(rollout.prompt_lengths + rollout.response_lengths)[:, None]
    )

    def bare() -> None:
        for model in models:
            model.update(tokens, masked, attention, target)

    try:
        yield {"ours": ours, "bare": bare}
    finally:
        host.close()


def product_flops(spec: ModelSpec, tokens: int, sampled: int) -> float:
    """Return the operations of the updates' products: forward, and twice that backward; the output layer for sampled
    tokens only."""
    blocks = spec.num_layers * matrix_numbers(spec)
    return float(6 * (2 * blocks * tokens + spec.vocab_size * spec.hidden_size * sampled))


def product_seconds(spec: ModelSpec, tokens: int, sampled: int, dtype: torch.dtype) -> float:
    """Return the seconds that those products take with the best library for each shape and each direction: the best of
    several runs of one layer's product, times the layers."""
    shapes = [shape for shape in layer_shapes(spec).values() if len(shape) == 2]
    total = 0.0
    for (outputs, inputs), rows, times in [
        *((shape, tokens, 2 * spec.num_layers) for shape in shapes),
        ((spec.vocab_size, spec.hidden_size), sampled, 1),
    ]:
        x, weight, grad = (
            torch.randn(s, dtype=torch.float32).to(dtype) for s in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        choices = Products if dtype is torch.float32 else (Products.TORCH,)
        for product in (
            partial(multiply, x, weight),
            partial(input_gradient, grad, weight),
            partial(weight_gradient, grad, x),
        ):
            best = float("inf")
            for library in choices:
                for _ in range(4):
                    started = time.perf_counter()
                    product(library)
                    best = min(best, time.perf_counter() - started)
            total += times * best
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", type=int, default=16)


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    torch.set_num_threads(options.threads)
    repeats = 1 if options.quick else options.repeats
    spec = read_spec(MODEL)
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    cases = [("bfloat16", "even")] if options.quick else [(d, s) for d in DTYPES for s in SHAPES]
    for dtype, shape in cases:
        seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        with (
            tempfile.TemporaryDirectory() as scratch,
            arms(dtype, shape, options.rows, options.threads, Path(scratch)) as sides,
            measured_load() as load,
        ):
            for _ in range(1 if options.quick else 2):  # memory is touched for the first time
                for update in sides.values():
                    update()
            for _ in range(repeats):
                for side, taken in seconds.items():
                    started = time.perf_counter()
                    sides[side]()
                    taken.append(time.perf_counter() - started)
        rollout = rollout_of(shape, options.rows, spec.vocab_size)
        tokens = int((rollout.prompt_lengths + rollout.response_lengths).sum())
        sampled = int(rollout.response_lengths.sum())
        least = product_seconds(spec, tokens, sampled, DTYPES[dtype])
        ours, bare = (statistics.median(seconds[side]) for side in ("ours", "bare"))
        name = f"{dtype}, {shape}"
        gflops = product_flops(spec, tokens, sampled) / 1e9
        rows.append(
            (
                name,
                f"{ours:.2f}",
                f"{bare:.2f}",
                f"{bare / ours:.2f}",
                f"{least / ours:.0%}",
                f"{gflops / ours:.0f}",
                f"{load().others:.0%}",
            )
        )
        figures |= {
            f"{name}/ours_s": ours,
            f"{name}/bare_s": bare,
            f"{name}/speedup": bare / ours,
            f"{name}/share_of_products": least / ours,
            f"{name}/products_s": least,
        }
    columns = ("update", "ours s", "bare s", "bare / ours", "of the products' best", "GFLOP/s", "others' load")
    title = f"Updates of policy and critic, {options.rows} rows, {options.threads} threads"
    report(title, columns, rows, [])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
